"""How far two correct implementations may differ, derived from the reference itself.

A sum has no order in mathematics and has one on a machine. So the reference is run again with its
reductions reordered: the weights are permuted along every reduced dimension, which leaves the
function as it is and changes only the rounding noise. Two distances are measured, each a metric:
how many elements differ, and the largest difference over the largest magnitude of its row. All
orderings seen lie within the largest distance from the reference as it is, so by the triangle
inequality any two of them are at most twice that apart: this is the bound.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reference.beam import BeamConfig

FALSE_ALARM = 1e-6  # probability of refusing an honest candidate when hardly any noise is seen


@dataclass(frozen=True)
class Distance:
    count: int  # elements that differ
    rows: int  # rows (last dimension) with at least one of them
    size: float  # largest difference, over the largest magnitude in its row


def distance(a: Tensor, b: Tensor) -> Distance:
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    gap = (a.double() - b.double()).abs()
    row = b.double().abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(b.dtype).tiny)
    size = (gap / row).max().item()
    differ = a != b
    rows = int(differ.any(dim=-1).sum())
    return Distance(int(differ.sum()), rows, size if not math.isnan(size) else math.inf)


def allowed(reference: Tensor, reordered: Iterable[Tensor]) -> Distance:
    """The farthest that an honest result may lie from `reference`.

    Where hardly any flip is seen, chance decides: `few` rows may differ, the number that a rate of
    three events in all reorderings (the bound on a rate of which none were seen) exceeds with
    probability FALSE_ALARM. Rows, because one early flip spreads over its row. And one flip may be
    as large as one rounding step.
    """
    seen = [distance(other, reference) for other in reordered]
    assert len(seen) > 1
    few = _unlucky(3 / len(seen))
    count = max(2 * max(d.count for d in seen), few * reference.shape[-1])
    size = max(2 * max(d.size for d in seen), torch.finfo(reference.dtype).eps)
    return Distance(count, max(2 * max(d.rows for d in seen), few), size)


def within(candidate: Tensor, reference: Tensor, reordered: Iterable[Tensor]) -> bool:
    found, most = distance(candidate, reference), allowed(reference, reordered)
    return found.count <= most.count and found.rows <= most.rows and found.size <= most.size


def assert_within(candidate: Tensor, reference: Tensor, reordered: Iterable[Tensor]) -> None:
    found, most = distance(candidate, reference), allowed(reference, reordered)
    assert found.count <= most.count, f"{found} > {most} of {reference.numel()} elements"
    assert found.rows <= most.rows, f"{found} > {most}"
    assert found.size <= most.size, f"{found} > {most}"


def _unlucky(expected: float) -> int:
    """The smallest count that a Poisson variable exceeds with probability below FALSE_ALARM."""
    term = below = math.exp(-expected)
    count = 0
    while 1.0 - below > FALSE_ALARM:
        count += 1
        term *= expected / count
        below += term
    return count


def permutation(size: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(size, generator=generator)


def reorderings(
    model: nn.Module,
    config: Any,
    count: int,
    seed: int = 0,
    permuted: Callable[..., dict[str, Tensor]] | None = None,
) -> Iterator[tuple[nn.Module, Tensor]]:
    """`count` times a model that computes the same function in another order, and the order of its
    hidden dimension: it maps h[..., order] to y[..., order].

    `model` is a Beam, or anything with its parameter names, or `permuted` says how to reorder its
    state dict. One copy is filled again each time.
    """
    twin = copy.deepcopy(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        order = permutation(config.hidden, generator)
        twin.load_state_dict((permuted or _permuted)(state, config, order, generator))
        yield twin, order


def undo(y: Tensor, order: Tensor) -> Tensor:
    """The hidden dimension of a reordered model's output [..., D] in the reference's order."""
    return y[..., order.argsort()]


def _permuted(
    state: dict[str, Tensor], c: BeamConfig, order: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """The hidden dimension, feed-forward widths, heads, value dimensions and (without RoPE, which
    ties them to frequencies) query and key dimensions, each in another order."""
    out = dict(state)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        out[name] = state[name][:, order]
    out["model.norm.weight"] = state["model.norm.weight"][order]
    for i in range(c.layers):
        prefix = f"model.layers.{i}."
        layer = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        for name, tensor in layer.items():
            if name.endswith("layernorm.weight"):
                layer[name] = tensor[order]
        _permute_attention(layer, c, c.is_full(i), order, generator)
        if "mlp.gate.weight" in layer:
            _permute_experts(layer, c, order, generator)
        else:
            inner = permutation(c.dense_ff, generator)
            for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
                layer[name] = layer[name][inner][:, order]
            layer["mlp.down_proj.weight"] = layer["mlp.down_proj.weight"][order][:, inner]
        out |= {prefix + name: tensor for name, tensor in layer.items()}
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _permute_attention(
    layer: dict[str, Tensor],
    c: BeamConfig,
    full: bool,
    order: Tensor,
    generator: torch.Generator,
) -> None:
    share = c.query_heads // c.kv_heads
    kv_heads = permutation(c.kv_heads, generator)
    heads = torch.cat([h * share + permutation(share, generator) for h in kv_heads])
    values = permutation(c.head_dim, generator)
    keys = permutation(c.head_dim, generator) if full else torch.arange(c.head_dim)

    def rows(heads: Tensor, dims: Tensor) -> Tensor:
        return (heads[:, None] * c.head_dim + dims).flatten()

    chosen = {
        "q_proj": rows(heads, keys),
        "k_proj": rows(kv_heads, keys),
        "v_proj": rows(kv_heads, values),
        "gate_proj": rows(heads, values),
    }
    for name, row in chosen.items():
        name = f"self_attn.{name}.weight"
        layer[name] = layer[name][row][:, order]
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        layer[name] = layer[name][keys]
    layer["self_attn.gate_bias"] = layer["self_attn.gate_bias"][heads]
    output = layer["self_attn.o_proj.weight"]
    layer["self_attn.o_proj.weight"] = output[order][:, rows(heads, values)]


def _permute_experts(
    layer: dict[str, Tensor], c: BeamConfig, order: Tensor, generator: torch.Generator
) -> None:
    inner = permutation(c.expert_ff, generator)
    layer["mlp.gate.weight"] = layer["mlp.gate.weight"][:, order]
    gate_up = layer["mlp.experts.gate_up_proj"].unflatten(1, (2, -1))
    layer["mlp.experts.gate_up_proj"] = gate_up[:, :, inner][..., order].flatten(1, 2)
    layer["mlp.experts.down_proj"] = layer["mlp.experts.down_proj"][:, order][..., inner]
