"""What the judge finds in the model: the specification's rounding points, and no other."""

import functools
from collections import Counter

import pytest

from harness.points import points_for_model
from harness.replay import Point
from harness.workload import Workload

LAYER = "model.language_model.layers."
SLIDING, FULL, LAST = 1, 0, 4

# Of a layer, in the specification's order.
ALWAYS = {
    "self_attn.project": 4,  # q, k, v, gate
    "self_attn.attend": 1,
    "self_attn.gate": 3,  # norm, sigmoid, product
    "self_attn.o_proj": 1,
    "attn_boundary": 4,  # norm, sum, 1 + w, norm
    "mlp.pool": 3,  # product, 1 + w, norm
    "mlp.experts": 4,  # each product by the grouped and by the gathered path
    "mlp.experts.activate": 2,  # silu, product
    "mlp.experts.post_expert_norm": 3,  # 1 + w, product, norm
    "mlp.experts.combine": 1,
    "mlp.post_expert_proj": 1,
}


@functools.cache
def workload() -> Workload:
    return Workload.load("muse-spark", "mini", "cpu")


@functools.cache
def points() -> list[Point]:
    return points_for_model(workload())


@pytest.mark.parametrize(
    ("layer", "prepare", "boundary"),
    [(SLIDING, 15, 6), (FULL, 3, 6), (LAST, 3, 5)],
    ids=["sliding", "full", "last"],
)
def test_rounding_points_of_a_layer(layer: int, prepare: int, boundary: int) -> None:
    """Norms, q's factor and, where positions turn, eight products and four sums; the boundary to
    the next layer has 1 + w twice, that to the head once."""
    prefix = f"{LAYER}{layer}."
    found = Counter(p.module.removeprefix(prefix) for p in points() if p.module.startswith(prefix))
    want = {**ALWAYS, "self_attn.prepare": prepare, "mlp_boundary": boundary}
    # The first layer's input is normed by itself, that of the others at a boundary.
    assert found == (want if layer else want | {"input_layernorm": 2})


def test_rounding_points_outside_the_layers() -> None:
    found = Counter(p.module for p in points() if not p.module.startswith(LAYER))
    embed = "model.language_model.embed_tokens"
    assert found == {"tables": 2, embed: 1, "lm_head": 1, "soft_cap": 4}
    assert len(points()) == 225
