"""What a correct implementation may do otherwise: other orders of summation, other last places.

These perturbations, replayed over all rows and many draws, give the reference's self-noise, from
which `harness.bounds` derives what a candidate may differ by.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.carried import Carried
from harness.operators import LOW
from harness.replay import Noise

TRANSCENDENTAL = frozenset(
    "exp exp2 expm1 log log2 log10 log1p rsqrt sigmoid tanh silu gelu softplus mish elu cos sin "
    "tan erf erfc pow log_sigmoid_forward logsumexp _softmax _log_softmax atan asin acos sinh "
    "cosh".split()
)
SUMS = frozenset(("sum", "mean"))
ALONG = frozenset(("var", "var_mean", "std", "linalg_vector_norm", "norm", "logsumexp", "prod"))
SOFTMAX = frozenset(("_softmax", "_log_softmax"))
ROWS, COLUMNS, CHAIN = range(3)  # kinds of products, see `kinds`
SMALLEST_CHUNK = 16  # partial sums of fewer terms are no kernel's
# One replay in so many multiplies FP32 on CUDA cores where tensor cores could. Few, since limits
# follow from the mean over replays of a kind, and a kernel on tensor cores has only the more
# frequent way.
CUDA_CORES = 4
BF16_TERMS = 3  # of 8 bits each hold an FP32 value's 24
TILE = 128  # rows and columns of a result that one multiprocessor computes
MOST = 1 << 27  # elements of such an operand of `chained_product`: 256 MiB in BF16


def kinds(device: torch.device) -> int:
    """How many kinds of replays there are on `device`, by how products are computed: `ROWS` and
    `COLUMNS`, how the second operand of the library's lies, and on CUDA `CHAIN`."""
    return 3 if device.type == "cuda" else 2


def _is_whole_power(called: str, args: Any) -> bool:
    """x ** 2 and the like are products, not powers."""
    return called == "pow" and isinstance(args[1], (int, float)) and args[1] in (0, 1, 2, 3, 4)


class Perturbation:
    """One drawn perturbation: every operator of a replay gets its own draws from one seed."""

    def __init__(self, noise: Noise) -> None:
        self.noise = noise
        self.host = torch.Generator().manual_seed(noise.seed)
        self.generators: dict[torch.device, torch.Generator] = {}
        self.used = False  # whether anything varied
        self.tensor_cores: bool | None = None  # drawn when it first matters

    def _generator(self, device: torch.device) -> torch.Generator:
        if device.type == "cpu":
            return self.host
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.noise.seed)
        return self.generators[device]

    def _order(self, count: int, device: torch.device) -> Tensor:
        self.used = True
        return torch.randperm(count, generator=self._generator(device), device=device)

    def _draw(self, high: int) -> int:
        return int(torch.randint(high, (), generator=self.host))

    def scale(self) -> float:
        """A factor in [1, 2): where in its binade a value is rounded."""
        self.used = True
        return 1.0 + float(torch.rand((), generator=self.host))

    def run(
        self, func: Any, called: str, args: Any, kwargs: dict[str, Any], state: Any
    ) -> Tensor | None:
        """The operator's result, perturbed; None if it is not one that varies."""
        result = None
        if self.noise.reorder:
            result = self._reordered(func, called, args, kwargs, state)
        if self.noise.ulp and called in TRANSCENDENTAL and not _is_whole_power(called, args):
            if result is None:
                result = func(*state.values(args, True), **state.values(kwargs, True))
            result = self._nudge(result) if isinstance(result, Tensor) else result
        return result

    def _reordered(
        self, func: Any, called: str, args: Any, kwargs: dict[str, Any], state: Any
    ) -> Tensor | None:
        if called in ("mm", "bmm"):
            a, b = self._operands(args[:2], state)
            return self.product(a, b)
        if called in ("addmm", "baddbmm"):
            bias, a, b = self._operands(args[:3], state)
            order = self._order(a.shape[-1], a.device)
            return func(bias, a.index_select(-1, order), b.index_select(-2, order), **kwargs)
        if called in ("mv", "dot"):
            a, b = self._operands(args[:2], state)
            order = self._order(b.shape[-1], b.device)
            return func(a.index_select(-1, order), b.index_select(-1, order))
        if called not in SUMS | ALONG | SOFTMAX:
            return None
        x = state.values(args[0], True)
        if called in SUMS and (len(args) < 2 or not args[1]):
            order = self._order(x.numel(), x.device)
            return func(x.flatten().index_select(0, order), **kwargs)
        dims: Any = args[1] if len(args) > 1 else kwargs.get("dim")
        dim = dims[-1] if isinstance(dims, (list, tuple)) and dims else dims
        if not isinstance(dim, int) or not x.ndim:
            return None
        order = self._order(x.shape[dim], x.device)
        mixed = x.index_select(dim, order)
        if called in SOFTMAX:
            return func(mixed, *args[1:], **kwargs).index_select(dim, order.argsort())
        if called in SUMS and len(dims) == 1 and self._draw(2):
            return self._in_chunks(called, mixed, dim, args[2] if len(args) > 2 else False)
        return func(mixed, *args[1:], **kwargs)

    def _in_chunks(self, called: str, x: Tensor, dim: int, keepdim: bool) -> Tensor:
        """Partial sums, added one after the other."""
        count = x.shape[dim]
        pieces = 1 << self._draw(max(1, (count // SMALLEST_CHUNK).bit_length()))
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        for piece in x.tensor_split(pieces, dim=dim):
            total = total + piece.sum(dim, keepdim=keepdim)
        return total / count if called == "mean" else total

    def _operands(self, operands: Any, state: Any) -> list[Tensor]:
        """As the library multiplies them: in their own dtype while they are rounded."""
        narrow = all(x.is_narrow for x in operands if isinstance(x, Carried))
        return [state.values(x, not narrow) for x in operands]

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b with its inner dimension in another order."""
        if a.dtype != b.dtype:
            wide = torch.promote_types(a.dtype, b.dtype)
            a, b = a.to(wide), b.to(wide)
        order = self._order(a.shape[-1], a.device)
        a = a.index_select(-1, order)
        # A library has other kernels for other layouts of b, and tensor cores add up less exactly
        # than FP32: on an H200 one layout changed 0.28% of a projection's BF16 results, the
        # other about half as many (2026-11-29).
        kind = self.noise.kind
        kind = self._draw(kinds(a.device)) if kind is None else kind
        if kind == COLUMNS:
            b = b.transpose(-1, -2).index_select(-1, order).transpose(-1, -2)
        else:
            b = b.index_select(-2, order)
        if kind == CHAIN and a.device.type == "cuda":
            return chained_product(a, b)
        if a.dtype in LOW:
            return a @ b
        multiply = tensor_core_product if self._on_tensor_cores(a, b) else torch.matmul
        if not self._draw(2):
            return multiply(a, b)
        pieces = 1 << self._draw(max(1, min(6, (a.shape[-1] // SMALLEST_CHUNK).bit_length())))
        total = torch.zeros((), dtype=a.dtype, device=a.device)
        parts = a.tensor_split(pieces, dim=-1), b.tensor_split(pieces, dim=-2)
        for x, y in zip(*parts, strict=True):
            total = total + multiply(x, y)
        return total

    def _on_tensor_cores(self, a: Tensor, b: Tensor) -> bool:
        """Whether this FP32 product runs on BF16 tensor cores, as a kernel may choose where one
        operand only holds BF16 values: the other enters as terms that sum to it exactly."""
        if a.device.type != "cuda" or a.dtype != torch.float32:
            return False
        if self.tensor_cores is None:
            self.tensor_cores = self._draw(CUDA_CORES) > 0
        return self.tensor_cores

    def grouped(self, a: Tensor, b: Tensor, offs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Operands of a grouped product for the library's own kernel, the inner dimension in
        another order within each group. Groups along the inner dimension stay as they are."""
        if offs is not None and a.ndim == 2 and b.ndim == 2:
            return a, b
        order = self._order(a.shape[-1], a.device)
        b = b.transpose(-1, -2).index_select(-1, order).transpose(-1, -2)
        return a.index_select(-1, order), b

    def reordered(self, q: Carried, k: Carried) -> tuple[Tensor, Tensor]:
        """Attention's q and k with the head dimension in another order."""
        order = self._order(q.shape[-1], q.device)
        return q.value.index_select(-1, order), k.value.index_select(-1, order)

    def _nudge(self, result: Tensor) -> Tensor:
        """Every element moved by -1, 0 or +1 FP32 unit in the last place."""
        if result.dtype != torch.float32:
            return result
        self.used = True
        step = torch.randint(
            -1, 2, result.shape, generator=self._generator(result.device), device=result.device
        )
        towards = torch.where(step > 0, torch.inf, -torch.inf)
        moved = torch.nextafter(result, towards)
        keep = (step == 0) | (result == 0) | ~torch.isfinite(result)
        return torch.where(keep, result, moved)


def bf16_terms(x: Tensor) -> list[Tensor] | None:
    """The BF16 tensors whose sum is FP32 `x`, the largest first; what is smaller than FP32's normal
    numbers may be missing. None for infinities, NaN, and what rounds to an infinity."""
    terms = []
    for _ in range(BF16_TERMS):
        terms.append(x.bfloat16())
        x = x - terms[-1].float()
    return terms if bool((x.abs() < torch.finfo(x.dtype).tiny).all()) else None


def is_bf16(x: Tensor) -> bool:
    """Whether every value of FP32 `x` is one that BF16 has."""
    return bool((x.bfloat16() == x).all())


def chained_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, [M, K] with [K, N] or batches of them, each result one sum from the first term to the
    last, on tensor cores where they can multiply it without rounding. CUDA only.

    For few results a library splits a long sum over the card, and what cuts bits off then works on
    small sums. A kernel that computes several products as one, or adds an FP32 operand's BF16 terms
    to a running sum, does not: on an H200 such ones differed in 0.27% and 0.098% of their BF16
    results, where the library's orders differ in 0.20% and 0.066% (2026-11-30).
    """
    if a.dtype in LOW:
        return _widened(torch.matmul, a, b)
    if BF16_TERMS * max(a.numel(), b.numel()) > MOST:  # no memory for them beside a large model
        return tensor_core_product(a, b)
    terms = _in_terms(a, b)
    if terms is None:
        return a @ b
    long = torch.cat([x for x, _ in terms], dim=-1), torch.cat([y for _, y in terms], dim=-2)
    return _widened(_multiply_terms, *long)


def _widened(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """a times b by `multiply`, with as many copies as fill the card."""
    rows, columns = _copies(a, b)
    tall = torch.cat([a] * rows, dim=-2) if rows > 1 else a
    wide = torch.cat([b] * columns, dim=-1) if columns > 1 else b
    return multiply(tall, wide)[..., : a.shape[-2], : b.shape[-1]].contiguous()


def _copies(a: Tensor, b: Tensor) -> tuple[int, int]:
    """Of a's rows, or of b's columns if they are fewer elements, so that the result has a tile for
    each of the card's multiprocessors and no sum has to be split. (1, 1) where either would be more
    than `MOST` elements: then one may be."""
    card = torch.cuda.get_device_properties(a.device).multi_processor_count
    rows, columns = (-(-size // TILE) for size in (a.shape[-2], b.shape[-1]))
    times = -(-card // max(1, a.shape[:-2].numel() * rows * columns))
    if times == 1:
        return 1, 1
    of_rows = -(-times * rows * TILE // max(1, a.shape[-2]))
    of_columns = -(-times * columns * TILE // max(1, b.shape[-1]))
    in_rows, in_columns = of_rows * a.numel(), of_columns * b.numel()
    if min(in_rows, in_columns) > MOST:
        return 1, 1
    return (of_rows, 1) if in_rows < in_columns else (1, of_columns)


def _in_terms(a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]] | None:
    """Pairs of BF16 operands whose products sum to that of FP32 a and b, one of which holds BF16
    values only: it, with each of the other's terms. None where there are none."""
    if a.dtype != torch.float32:
        return None
    for narrow, wide in ((b, a), (a, b)):
        fits = narrow.numel() and wide.numel() and is_bf16(narrow)
        terms = bf16_terms(wide) if fits else None
        if terms is not None:
            short = narrow.bfloat16()
            return [(term, short) if wide is a else (short, term) for term in terms]
    return None


def _multiply_terms(a: Tensor, b: Tensor) -> Tensor:
    """BF16 a @ b in FP32. CUDA only."""
    return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)


def tensor_core_product(a: Tensor, b: Tensor) -> Tensor:
    """FP32 a @ b, [M, K] with [K, N] or batches of them, on BF16 tensor cores; nothing is rounded.

    Tensor cores align the terms of a sum and cut bits off, which no order of FP32 sums shows: an
    attention kernel on them differed from the reference in 0.081% of its BF16 results where orders
    of FP32 sums differ in 0.048% (H200, 2026-11-29). The plain product where neither operand holds
    BF16 values only, or the other is no sum of BF16 terms. CUDA only.
    """
    terms = _in_terms(a, b)
    if terms is None:
        return a @ b
    total = torch.zeros((), dtype=a.dtype, device=a.device)
    for x, y in terms:
        total = total + _multiply_terms(x, y)
    return total
