"""Device code of RMSNorms whose weight enters in different ways.

    weighted      R(x / rms(x) * w)
    centred       R(x / rms(x) * R(1 + w))
    input-scaled  R(s / rms(s)),  s = R(x * R(1 + w))
    unit          R(x / rms(x))

R rounds to BF16; all else is FP32.
"""

import triton
import triton.language as tl


@triton.jit
def norm_factor(weight, CENTRED: tl.constexpr):
    """What a norm's BF16 weight multiplies by, FP32: the weight, or one more, rounded."""
    wide = weight.to(tl.float32)
    if CENTRED:
        wide = (wide + 1.0).to(tl.bfloat16).to(tl.float32)
    return wide


@triton.jit
def scaled_input(x, weight):
    """R(x * R(1 + w)) as FP32: what the input-scaled norm divides by its root mean square."""
    return (x * norm_factor(weight, True)).to(tl.bfloat16).to(tl.float32)
