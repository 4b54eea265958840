"""A whole model with many regions' kernels in it: prefill and decode as the reference's."""

import numpy as np
import pytest
import torch

from optimized.catalog import load_change
from optimized.change import apply_change, share
from tests.optimized.kernel_checks import DEVICE, INTERPRETED, needs_kernels
from tests.reference import muse_spark_toy as toy
from tests.reference.noise import assert_within

CHANGES = (
    "gated_boundary",
    "qk_unit_norm_rope",
    "qk_unit_norm",
    "output_norm_gate",
    "biased_router",
    "pooler",
    "normed_experts",
    "unpooler",
    "soft_cap",
)


@needs_kernels
@pytest.mark.skipif(DEVICE == "cuda" and not INTERPRETED, reason="the toy is built on the CPU")
def test_a_model_of_kernels():
    """Two tokens as a prefill and one after them, over a window of two."""
    sizes = {"layers": 2, "hidden": 64, "vocabulary": 40, "window": 2, "experts": 4, "top_k": 2}
    sizes |= {"query_heads": 2, "kv_heads": 1, "expert_width": 32, "expert_ff": 16}
    model = toy.build(torch.bfloat16, **sizes)
    fused = share(model)
    for name in CHANGES:
        assert apply_change(fused, load_change(name), "triton")
    ids = torch.randint(40, (1, 3), generator=torch.Generator().manual_seed(0))
    expected = toy.run(model, ids, [2, 3])
    twins = [toy.run(twin, ids, [2, 3]) for twin, _ in toy.reorderings(model, model.config, 8)]
    with np.errstate(over="ignore", invalid="ignore"):  # a GPU does not warn of inf and NaN either
        found = toy.run(fused, ids, [2, 3])
    assert_within(found, expected, twins)
