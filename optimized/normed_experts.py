"""The routed experts with a norm of each one's output, and their weighted sum.

    gate, up = R(W_gate z), R(W_up z)      per chosen expert
    hidden   = R(R(silu(gate)) * up)
    y_k      = R(W_down hidden)            summed over tensor-parallel ranks
    n_k      = R(s / rms(s)),  s = R(y_k * R(1 + w))
    out      = R(scale * sum_k weight_k n_k), in slot order

R rounds to BF16; sums are FP32. N tokens, K experts a token, P = N K pairs, E experts, D width, F
inner width. All rounding points are kept; none is added.

A norm needs its expert's whole output, so three kernels: few pairs read their experts' weights in
place (`experts_up`, `pair_products`), the second product's before the first is done; many are
sorted by expert for grouped matrix products (`grouped_experts`). Norms and sum are one kernel
(`norm_combine`). Weights are nearly all the traffic of a few pairs, 3 F D BF16 values each: 101 MB
for the 8 pairs of a token at D = 4096, F = 512, 23 us at an H200's 4.33 TB/s (2026-11-29).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from optimized import routed_experts
from optimized.change import Change, Contract, Implementation, KnobValue
from optimized.expert_knobs import MAX_PAIRS
from optimized.experts_up import experts_up
from optimized.grouped_experts import GroupedKnobs, grouped_experts
from optimized.norm_combine import MAX_WIDTH, NormCombineKnobs, norm_combine
from optimized.pair_products import PairKnobs, pair_product
from optimized.routed_experts import shape
from optimized.triton_support import outside_domain


class NormedKnobs:
    """`PairKnobs` of few pairs, `GroupedKnobs` of many."""

    def __new__(cls, **values: Any):
        return (GroupedKnobs if "row_tile" in values else PairKnobs)(**values)

    @staticmethod
    def heuristic(shape: Mapping[str, int]) -> PairKnobs | GroupedKnobs:
        return (GroupedKnobs if shape["P"] > MAX_PAIRS else PairKnobs).heuristic(shape)

    @staticmethod
    def candidates(shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return (GroupedKnobs if shape["P"] > MAX_PAIRS else PairKnobs).candidates(shape)


def guard(node: Any, z: Tensor, weights: Tensor, experts: Tensor) -> str | None:
    """Why the kernels do not take this call, or None."""
    norm = node.post_expert_norm.weight
    if z.shape[-1] > MAX_WIDTH or not norm.is_contiguous():
        return f"width {z.shape[-1]}, the kernels take up to {MAX_WIDTH}; or the norm is strided"
    return routed_experts.guard(node, z, weights, experts) or outside_domain(norm=norm)


def build(node: Any, knobs: PairKnobs | GroupedKnobs | None):
    """(z [N, D] BF16, weights [N, K] FP32, experts [N, K] int64) -> [N, D] BF16."""

    def forward(z: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        places = summed = None
        if experts.numel() > MAX_PAIRS:
            grouped = knobs if isinstance(knobs, GroupedKnobs) else None
            y, order = grouped_experts(node, z, experts, grouped, rounded=True)
            places = order.places
        else:
            experts = experts.contiguous()  # PyTorch's router leaves them in the rows of a sort
            few = knobs if isinstance(knobs, PairKnobs) else None
            chosen = few or PairKnobs.heuristic(shape(node, z, weights, experts))
            hidden = experts_up(z, experts, node.gate_up_proj, chosen.of("up"), rounded=True)
            y = pair_product(hidden, experts, node.down_proj, chosen.of("down"))
            summed = NormCombineKnobs(**chosen.of("sum"))
        y = node.rank_sum(y)
        norm, scale = node.post_expert_norm, node.combine.scale
        return norm_combine(y, weights, norm.weight, norm.eps, scale, places=places, knobs=summed)

    return forward


CHANGE = Change(
    name="normed_experts",
    region="normed_experts",
    summary="experts read in place, SwiGLU, output norms and the weighted sum in their kernels",
    # Knobs are tuned by the number of pairs, and with them the order of the sums.
    contract=Contract(numerics="reduction", batch_invariant=False),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=NormedKnobs,
            shape=shape,
        ),
    ),
)
