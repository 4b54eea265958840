"""Operators that refuse wide dtypes, computed by others that don't."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SCORES = 1 << 26  # of attention held at once: 256 MiB in FP32, and that for each step of it

Product = Callable[[Tensor, Tensor], Tensor]


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None, product: Product, dtype: torch.dtype
) -> Tensor:
    """`torch._grouped_mm` as a loop over its groups; `product(a, b)` multiplies one.

    Only the operands of one group are ever held in another dtype. a [M, K] with b [G, K, N] and
    row ends `offs` [G], a [G, M, K] with b [G, K, N], a [G, M, K] with b [K, N] and column ends,
    or a [M, K] with b [K, N] and ends along K.
    """
    if a.ndim == 3 and b.ndim == 3:
        return torch.stack([product(x, y) for x, y in zip(a, b, strict=True)])
    if offs is None:
        raise NotImplementedError("grouped matrix product of 2-d operands without offsets")
    ends = [int(end) for end in offs.tolist()]
    starts = [0, *ends[:-1]]
    spans = list(zip(starts, ends, strict=True))
    if a.ndim == 2 and b.ndim == 3:
        out = torch.zeros(a.shape[0], b.shape[2], dtype=dtype, device=a.device)
        for i, (first, last) in enumerate(spans):
            if last > first:
                out[first:last] = product(a[first:last], b[i])
        return out
    if a.ndim == 3:
        out = torch.zeros(a.shape[1], b.shape[1], dtype=dtype, device=a.device)
        for i, (first, last) in enumerate(spans):
            if last > first:
                out[:, first:last] = product(a[i], b[:, first:last])
        return out
    return torch.stack([product(a[:, first:last], b[first:last]) for first, last in spans])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    probabilities: Callable[[Tensor], Tensor],
) -> Tensor:
    """Scaled dot-product attention by its equation; q [B, H, T, d], k, v [B, Hkv, S, d].

    `probabilities` sees softmax's result, so that a rounding may be added there. As in PyTorch's
    own, a query that sees nothing gets zeros. Of long sequences some queries are taken at a time.
    """
    if k.shape[1] != q.shape[1]:
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if causal:
        shape = q.shape[-2], k.shape[-2]
        mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril()
    each_sees_its_own = mask is not None and mask.ndim > 1 and mask.shape[-2] > 1
    count = max(1, SCORES // max(1, q.shape[:2].numel() * k.shape[-2]))
    found = []
    for rows in q.split(count, dim=-2):
        first = sum(x.shape[-2] for x in found)
        seen = mask
        if mask is not None and each_sees_its_own:
            seen = mask[..., first : first + rows.shape[-2], :]
        found.append(_of_queries(rows, k, v, seen, scale, probabilities))
    return torch.cat(found, dim=-2) if len(found) > 1 else found[0]


def _of_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    probabilities: Callable[[Tensor], Tensor],
) -> Tensor:
    """`attention` of all queries at once, where there are as many KV heads as query heads."""
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        else:
            scores = scores + mask
    p = torch.softmax(scores, dim=-1)
    sees = (scores > -torch.inf).any(dim=-1, keepdim=True)
    return probabilities(torch.where(sees, p, 0.0)) @ v


def keywords(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of an ATen call by name, defaults included."""
    found = dict(kwargs)
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            found[argument.name] = args[i]
        elif argument.name not in found:
            found[argument.name] = argument.default_value
    return found
