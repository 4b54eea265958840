"""The projection of a few rows back to the model's width, by `linear_decode`'s kernels.

    y = R(x W^T)

x [N, D], W [O, D], BF16; FP32 accumulation, one rounding. x may be some columns of wider rows, as
on a tensor-parallel rank that serves a part of them.
"""

from optimized.change import Change, Contract, Implementation
from optimized.gemv import GemvKnobs
from optimized.linear_decode import build, build_inductor, guard, shape

CHANGE = Change(
    name="unpooler",
    region="unpooler",
    summary="a projection of a few rows by a kernel that keeps more loads in flight",
    contract=Contract(numerics="reduction"),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=GemvKnobs,
            shape=shape,
        ),
        Implementation(backend="inductor", devices=("cpu",), build=build_inductor),
    ),
)
