"""A norm by one plus its weight, in one kernel, that of `optimized.row_norm`: a model's first.

    y = R(x / rms(x) * R(1 + w))

R rounds to BF16; all else is FP32. x [..., D] -> [..., D], BF16. Moves 2 D BF16 values a row. The
rounding of the factor is kept; none is added.
"""

from optimized.rms_norm import norm_change

CHANGE = norm_change("centred_norm", "centred_norm", "centred")
