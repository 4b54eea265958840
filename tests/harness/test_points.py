"""The points' table holds what the architecture's specification lists, at the right lines."""

import linecache

from harness.points import COLUMNS, points_for_model, points_table, rounding_points
from tests.harness.judged import mini, toy


def source_line(source: str) -> str:
    path, _, line = source.rpartition(":")
    return linecache.getline(path, int(line)).strip()


def test_beam_minis_points() -> None:
    points = points_for_model(mini())
    assert len({p.name for p in points}) == len(points)
    count: dict[str, int] = {}
    for p in points:
        key = p.module.split(".")[-1]
        count[key] = count.get(key, 0) + 1
    c = mini().config
    full = sum(c.is_full(i) for i in range(c.layers))
    dense = sum(c.is_dense(i) for i in range(c.layers))
    assert count["attn_boundary"] == count["mlp_boundary"] == 5 * c.layers  # items 10 and 11
    assert count["gate"] == 3 * c.layers  # item 8; the router is FP32 throughout
    assert count["prepare"] == 4 * (c.layers - full) + 3 * full  # items 4 and 5
    assert count["attend"] == count["o_proj"] == c.layers  # items 7 and 9
    assert count["project"] == 4 * c.layers + 2 * dense  # items 3 and 14
    assert count["activate"] == c.layers  # items 13 and 14
    assert count["experts"] == 4 * (c.layers - dense)  # grouped in the prefill, gathered after
    assert count["combine"] == c.layers - dense
    assert count["input_layernorm"] == count["lm_head"] == 1
    assert sum(count.values()) == len(points) - count.get("", 0)


def test_names_lines_and_operators() -> None:
    points = {p.name: p for p in points_for_model(mini())}
    add = points["model.layers.0.attn_boundary: y * self.y_scale + h * self.h_scale"]
    assert add.operator == "add" and add.interior and add.dtype == "bfloat16"
    assert add.source.startswith("reference/beam.py:")
    assert "y * self.y_scale + h * self.h_scale" in source_line(add.source)
    norm = points["model.layers.0.attn_boundary: rms_norm(y, post_weight, self.eps)"]
    assert source_line(norm.source) == "return (scaled * weight.float()).to(x.dtype)"
    gate = points["model.layers.0.self_attn.gate: torch.sigmoid(gate + bias[:, None])"]
    assert gate.operator == "sigmoid" and len(gate.shape) == 4


def test_table_folds_layers() -> None:
    columns, rows = points_table(points_for_model(mini()))
    assert columns == COLUMNS
    boundary = [r for r in rows if r[0] == "model.layers.*.attn_boundary"]
    assert [r[-1] for r in boundary] == ["6"] * 5


def test_points_of_a_function_and_of_an_unknown_model() -> None:
    import torch

    x = torch.randn(3, 8).bfloat16()
    points = rounding_points(lambda x: (x * 2 + 1).float().sum(-1).bfloat16(), (x,))
    assert [p.operator for p in points] == ["mul", "add", "_to_copy"]
    assert [p.interior for p in points] == [True, True, False]
    found = points_for_model(toy())
    adds = [p for p in found if p.name == "blocks.1.second: residual + x"]
    assert len(adds) == 1 and adds[0].source.endswith(
        f"toy_model.py:{adds[0].source.split(':')[1]}"
    )
    assert any(p.module == "blocks.0.mixture" and p.operator == "gelu" for p in found)
