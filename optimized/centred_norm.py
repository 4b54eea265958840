"""A norm by one plus its weight, in one kernel, that of `optimized.row_norm`: a model's first.

    y = R(x / rms(x) * R(1 + w))

R rounds to BF16; all else is FP32. x [..., D] -> [..., D], BF16. Moves 2 D BF16 values a row. The
rounding of the factor is kept; none is added.
"""

from optimized.change import Change, Contract, Implementation
from optimized.inductor import inductor_implementation
from optimized.rms_norm import builder, guard, shape
from optimized.row_norm import RowNormKnobs

CHANGE = Change(
    name="centred_norm",
    region="centred_norm",
    summary="a norm that is no part of a boundary in one kernel",
    contract=Contract(numerics="reduction", batch_invariant=True),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=builder("centred"),
            guard=guard,
            knobs=RowNormKnobs,
            shape=shape,
        ),
        inductor_implementation(),
    ),
)
