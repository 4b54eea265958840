"""The router without groups: `router_topk`'s kernels, with one group and scaled logits.

    s       = sigmoid(float(x) W^T * c)                FP32 throughout, no TF32
    experts = the best K by s + b, in order
    weights = s of those / (their sum + a floor)

Ties go to the lower index. N tokens, D hidden, E experts; c scales the logits. There is no BF16
rounding point. Moves 4 E D bytes of weights, 8.4 MB or 1.9 us at an H200's 4.33 TB/s (2026-11-29)
for 256 x 8192.
"""

from optimized.change import Change, Contract, Implementation
from optimized.router_topk import EitherKnobs, build, guard, shape

CHANGE = Change(
    name="biased_router",
    region="biased_router",
    summary="FP32 router: logits, on tensor cores for many tokens, then top-k in one warp",
    contract=Contract(numerics="reduction"),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=EitherKnobs,
            shape=shape,
        ),
    ),
)
