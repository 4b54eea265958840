"""What kind of operator each ATen call is, and the dtype it would have returned."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

LOW = {torch.bfloat16, torch.float16} | {
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
}

# Results are elements of the arguments, or their negatives or absolute values: nothing to round.
MOVES = frozenset(
    "clone cat stack index index_select gather take embedding where masked_fill repeat roll flip "
    "constant_pad_nd tril triu masked_select sort topk max min amax amin maximum minimum relu neg "
    "abs index_put index_copy scatter slice_scatter select_scatter diagonal_scatter index_fill "
    "masked_scatter _unsafe_view _unsafe_index _reshape_copy copy fill zero sign kthvalue median "
    "mode cummax cummin fmax fmin unfold_copy _local_scalar_dense contiguous lift_fresh_copy "
    "_index_put_impl repeat_interleave view_copy".split()
)
FACTORIES = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like "
    "new_zeros ones ones_like new_ones full full_like new_full arange linspace eye scalar_tensor "
    "rand randn rand_like randn_like randperm".split()
)
DECISIONS = frozenset("argmax argmin argsort gt ge lt le eq ne isnan isinf isfinite".split())
SELECTS = frozenset("sort topk max min kthvalue median mode cummax cummin".split())
CHOOSES = frozenset("sort topk argmax argmin argsort max kthvalue".split())


def is_real(dtype: torch.dtype) -> bool:
    """Whether tensors of `dtype` hold values that a replay carries."""
    return dtype.is_floating_point or dtype.is_complex


@functools.lru_cache(maxsize=2048)
def name(func: OpOverload) -> str:
    """ "add_.Tensor" -> "add": the operator without overload and in-place mark."""
    return func._schema.name.partition("::")[2].removesuffix("_")


@functools.lru_cache(maxsize=2048)
def is_view(func: OpOverload) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


@functools.lru_cache(maxsize=2048)
def written(func: OpOverload) -> tuple[int, ...]:
    """Positions of the arguments that the operator writes to."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(i)
    return tuple(found)


@functools.lru_cache(maxsize=2048)
def decomposes(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def is_move(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    called = name(func)
    if called not in MOVES:
        return False
    if called in ("index_put", "_index_put_impl"):
        accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        return not accumulate
    return "reduce" not in kwargs and func._overloadname not in ("reduce", "value_reduce")


class Dtypes:
    """The dtype of each result in the original dtypes, found on the meta device and remembered."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[torch.dtype | None, ...]] = {}

    def of(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.dtype | None, ...]:
        """One dtype for each result, None where it is no tensor."""
        key = (func, _key(args), tuple((k, _key(v)) for k, v in sorted(kwargs.items())))
        if key not in self.known:
            self.known[key] = self._find(func, args, kwargs)
        return self.known[key]

    def _find(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.dtype | None, ...]:
        metas = _to_meta(args), {k: _to_meta(v) for k, v in kwargs.items()}
        if "device" in metas[1]:
            metas[1]["device"] = torch.device("meta")
        try:
            result = func(*metas[0], **metas[1])
        except (NotImplementedError, RuntimeError):  # no meta kernel, or a result sized by data
            return (_promoted(args, kwargs),)
        items = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(r.dtype if isinstance(r, Tensor) else None for r in items)


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.ndim == 0, value.device.type == "cpu"
    if isinstance(value, (list, tuple)):
        return tuple(_key(v) for v in value)
    if isinstance(value, torch.dtype):
        return value
    return type(value)


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.ndim == 0:
            return torch.empty((), dtype=value.dtype, device="meta")
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_to_meta(v) for v in value)
    return value


def _promoted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    if isinstance(kwargs.get("dtype"), torch.dtype):
        return kwargs["dtype"]
    found = None
    for value in args:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                dtype = tensor.dtype
                found = dtype if found is None else torch.promote_types(found, dtype)
    return found
