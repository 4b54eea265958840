"""silu(gate) * up with silu rounded, in one kernel: `swiglu`'s.

    out = R(R(silu(gate)) * up),  silu(g) = g / (1 + exp(-g))

R rounds to BF16; all else is FP32. N rows, F feed-forward width. Moves 3 N F BF16 values. Both
rounding points are kept; none is added.
"""

from torch import nn

from optimized.change import Change, Contract, Implementation
from optimized.inductor import inductor_implementation
from optimized.swiglu import SwiGLUKnobs, activation, cases, guard, shape
from optimized.triton_support import OfflineCase


def build(node: nn.Module, knobs: SwiGLUKnobs | None):
    """(gate [..., F], up [..., F]) -> [..., F], BF16."""
    return activation(knobs, rounded=True)


def offline_cases() -> list[OfflineCase]:
    """One of eight tensor-parallel ranks' part of top-8 experts: a prefill."""
    return cases(512, (131072,), rounded=True)


CHANGE = Change(
    name="rounded_swiglu",
    region="rounded_swiglu",
    summary="silu(gate) * up in one kernel, both rounded",
    contract=Contract(numerics="transcendental", batch_invariant=True),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=SwiGLUKnobs,
            shape=shape,
        ),
        inductor_implementation(),
    ),
)
