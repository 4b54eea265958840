"""A tensor that advertises one dtype and carries its value in another.

`Carried` looks like the tensor the model made (dtype, shape, strides, device), so the model's own
code takes the path it always takes. Its value lives in a `Box`: in the advertised dtype while it
is exactly that (a rounded value, a weight, an input), or wider where a rounding was left out.
Views share the box, so writes to a cache slice reach the cache, and a box may be widened under its
views.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ATTENTION = F.scaled_dot_product_attention


def flat(tensor: Tensor) -> Tensor:
    """The whole storage behind `tensor` as one dimension."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


class Box:
    """Storage that carried tensors alias.

    `external` storage belongs to the caller and is copied before the first write. `low` is the
    dtype that the content is known to be representable in, `origins` the rounding points whose
    results it holds copies of, `kind` the operator that made all of it, if that matters. `point` is
    the rounding point whose result it is; `exact` that result before its rounding, for operators
    inside the modules called `readers`.
    """

    __slots__ = (
        "root",
        "external",
        "version",
        "dirty",
        "low",
        "origins",
        "kind",
        "product",
        "unspecified",
        "point",
        "exact",
        "readers",
    )

    def __init__(self, root: Tensor, *, external: bool = False) -> None:
        self.root = root
        self.external = external
        self.version = 0
        self.dirty = False  # written to since it was made
        self.low: torch.dtype | None = None
        self.origins: frozenset[int] = frozenset()
        self.kind: str | None = None
        self.product: tuple[Tensor | float, Tensor | float] | None = None  # its exact factors
        self.unspecified: Tensor | None = None  # elements of the storage, once written in conflict
        self.point: int | None = None
        self.exact: Tensor | None = None
        self.readers: frozenset[str] = frozenset()

    def prepare_write(self, dtype: torch.dtype) -> None:
        """Make the storage ours, in `dtype`."""
        if self.external or self.root.dtype != dtype:
            storage = flat(self.root)
            self.root = storage.clone() if storage.dtype == dtype else storage.to(dtype)
            self.external = False
            self.version += 1
        self.dirty = True
        self.point = self.exact = None


class Carried(torch.Tensor):
    """See the module's docstring; made by `carry`, understood by `harness.replay.Replay` alone."""

    box: Box
    _value: Tensor
    _version_seen: int

    @property
    def value(self) -> Tensor:
        """The carried value: an alias of the box's storage."""
        if self._version_seen != self.box.version:
            old = self._value
            self._value = flat(self.box.root).as_strided(
                old.shape, old.stride(), old.storage_offset()
            )
            self._version_seen = self.box.version
        return self._value

    @property
    def is_narrow(self) -> bool:
        """Whether the value is held in the advertised dtype."""
        return self.value.dtype == self.dtype

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Which library kernel serves attention is decided below this level, on the real tensors.
        if func is ATTENTION:
            return current().attention(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return current().dispatch(func, args, kwargs or {})


def carry(value: Tensor, dtype: torch.dtype, box: Box) -> Carried:
    """Wrap `value`, which aliases `box`, as a tensor of `dtype`."""
    wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        Carried,
        value.shape,
        strides=value.stride(),
        storage_offset=value.storage_offset(),
        dtype=dtype,
        device=value.device,
        requires_grad=False,
    )
    wrapper._value, wrapper.box, wrapper._version_seen = value, box, box.version
    return wrapper


def unrounded(tensor: Carried) -> Carried:
    """The tensor as it was before its box's rounding."""
    exact = tensor.box.exact
    assert exact is not None
    box = Box(exact)
    box.origins, box.kind = tensor.box.origins, tensor.box.kind
    value = exact.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return carry(value, tensor.dtype, box)


_running: list[Any] = []


def current() -> Any:
    """The replay that is running."""
    if not _running:
        raise RuntimeError("a carried tensor was used outside its replay")
    return _running[-1]


def enter(replay: Any) -> None:
    _running.append(replay)


def leave() -> None:
    _running.pop()
