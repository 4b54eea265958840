"""Kernel rows, their sums, layer maps and diffs, on traces made by hand."""

import random
import re
from dataclasses import replace

import pytest

from tests.traces.made import CEILINGS, Did, trace
from traces import diff_page
from traces.diff import diff, noise
from traces.kernels import KernelTable, aggregate, common, headroom, kernel_rows
from traces.layers import layer_map
from traces.tables import print_rows
from traces.trace import Trace

LAYERS = ("layers.0", "layers.1", "layers.2")


def stack(*names: tuple[str, ...], kinds: dict[str, str] | None = None) -> Trace:
    """Layers that launch the named kernels, each 10 us, 1000 bytes read and 1000 written."""
    calls = [("", None), *((layer, 0) for layer in LAYERS)]
    kernels = [
        Did(name=name, call=i, reads=[(0, 1000)], writes=[(1, 1000)], source=f"model.py:{n}")
        for i, own in enumerate(names, start=1)
        for n, name in enumerate(own)
    ]
    return trace(kernels, calls, layers=LAYERS, kinds=kinds)


def test_a_row_has_the_floor_of_its_bytes_or_of_its_operations() -> None:
    t = trace(
        [
            Did(name="copy", call=0, reads=[(0, 3000)], writes=[(1, 1000)]),
            Did(name="gemm", call=0, reads=[(0, 1000)], flops=8_000_000, matmul=True),
            Did(name="sum", call=0, reads=[(0, 1000)], flops=800_000),
        ],
        [("", None)],
    )
    rows = kernel_rows(t, CEILINGS)
    assert [row.floor_us for row in rows] == [4.0, 8.0, 8.0]
    assert [headroom(row) for row in rows] == [2.5, 1.25, 1.25]
    assert [row.bytes for row in rows] == [4000, 1000, 1000]
    assert all(row.calls == 1 and row.gap_us == 2.0 for row in rows)


def test_without_ceilings_there_is_no_floor() -> None:
    rows = kernel_rows(stack(("a",), (), ()))
    assert rows[0].floor_us is None
    assert headroom(rows[0]) is None


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("kernel", [("a", 3, "layers.*"), ("b", 1, "layers.1")]),
        ("module", [("a, b", 4, "layers.*")]),
        ("region", [("a, b", 4, "layers.*")]),
        ("line", [("a", 3, "layers.*"), ("b", 1, "layers.1")]),
    ],
)
def test_rows_are_summed(by, expected) -> None:
    rows = kernel_rows(stack(("a",), ("a", "b"), ("a",)), CEILINGS)
    summed = aggregate(rows, by)
    assert [(r.name, r.calls, r.module) for r in summed] == expected
    assert sum(r.time_us for r in summed) == 40.0
    assert sum(r.bytes or 0 for r in summed) == 8000
    assert sum(r.gap_us or 0 for r in summed) == 8.0


def test_an_unknown_sum_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel, module, region, line"):
        aggregate([], "colour")  # type: ignore[arg-type]


def test_common_names_of_modules() -> None:
    assert common(["layers.0.mlp", "layers.3.mlp"]) == "layers.*.mlp"
    assert common(["layers.0.mlp", "layers.0.norm"]) == "layers.0.*"
    assert common(["head"]) == "head"


def test_layers_that_launch_the_same_are_one_kind() -> None:
    t = stack(("a", "b"), ("a",), ("a", "b"))
    maps = layer_map(kernel_rows(t), t.outline)
    assert [(m.kind, m.module, len(m.kernels)) for m in maps] == [
        ("0", "layers.0", 2),
        ("1", "layers.1", 1),
    ]
    assert [row.name for row in maps[0].kernels] == ["a", "b"]


def test_a_layers_own_word_for_its_kind_is_used() -> None:
    kinds = {"layers.0": "wide", "layers.1": "wide", "layers.2": "narrow"}
    t = stack(("embed", "a"), ("a",), ("a",), kinds=kinds)
    maps = layer_map(kernel_rows(t), t.outline)
    assert [(m.kind, m.module) for m in maps] == [("wide", "layers.1"), ("narrow", "layers.2")]


def test_diff_tells_what_came_and_went_by_module() -> None:
    before = kernel_rows(stack(("a", "b"), ("a", "b"), ("c",)))
    after = kernel_rows(stack(("fused",), ("fused",), ("c",)))
    (change,) = diff(before, after)
    assert (change.module, change.status) == ("layers.*", "faster")
    assert (change.kernels_before, change.kernels_after) == (5, 3)
    assert change.appeared == {"fused": 2}
    assert change.vanished == {"a": 2, "b": 2}
    assert change.delta_us == -20.0


def test_diff_of_a_module_that_only_one_side_has() -> None:
    one = trace([Did(name="a", call=1)], [("", None), ("old", 0)])
    two = trace([Did(name="a", call=1, time_us=4.0)], [("", None), ("new", 0)])
    changes = {d.module: d.status for d in diff(kernel_rows(one), kernel_rows(two))}
    assert changes == {"old": "vanished", "new": "appeared"}
    assert [d.status for d in diff(kernel_rows(one), kernel_rows(one))] == ["same"]


def test_diff_as_a_page_draws_both_sides_to_one_scale() -> None:
    before = stack(("a", "b"), ("a", "b"), ("c",))
    after = stack(("<fused>",), ("<fused>",), ("c",))
    page = diff_page.page(before, after, diff(kernel_rows(before), kernel_rows(after)), None)
    assert "<h2>layers.*</h2>" in page and '<b class="faster">faster</b>' in page
    assert "50.0 → 30.0 µs" in page and "-20.0 µs" in page and "5 → 3 kernels" in page
    assert re.findall(r'width="([\d.]+)" height="8"', page) == ["1000.0", "600.0"]
    assert "<summary>2 appeared</summary><ul><li>2 × <code>&lt;fused&gt;</code>" in page
    assert "2 × <code>a</code></li><li>2 × <code>b</code>" in page
    assert not re.search(r"https?:|src=|<script", page)


NAMES = "embed", "norm", "attend", "project", "experts", "gate", "head"
NOISE_US = 0.0, 1.0, -1.0, 1.0, -2.0, 2.0, -1.0


def busy(machine: float = 1.0, swap: str = "", **factors: float) -> KernelTable:
    """A module each of NAMES, 100 us and some noise; `machine` and `factors` make them slower."""
    calls = [("", None), *((name, 0) for name in NAMES)]
    noise_us = NOISE_US if machine != 1.0 or factors or swap else (0.0,) * len(NAMES)
    did = [
        Did(
            name=f"{swap}_{name}" if swap and name == "gate" else name,
            call=at,
            time_us=machine * factors.get(name, 1.0) * 100.0 + extra,
        )
        for at, (name, extra) in enumerate(zip(NAMES, noise_us, strict=True), start=1)
    ]
    return kernel_rows(trace(did, calls))


def test_diff_tells_noise_from_what_got_slower() -> None:
    before, after = busy(), busy(attend=1.2)
    still = noise(before, after)
    assert still is not None and still.modules == len(NAMES)
    assert still.ratio == pytest.approx(1.01) and still.scatter > 0
    changes = {d.module: d.status for d in diff(before, after)}
    assert changes == {**dict.fromkeys(NAMES, "same"), "attend": "slower"}
    assert diff(before, after)[0].module == "attend"
    assert {d.status for d in diff(before, busy(attend=1.04))} == {"same"}


def test_diff_tells_a_slower_machine_from_a_slower_module() -> None:
    before, after = busy(), busy(machine=1.3, gate=0.5)
    found = {d.module: d for d in diff(before, after)}
    assert found["norm"].delta_us > 25 and found["norm"].status == "same"
    assert found["gate"].status == "faster"
    assert found["gate"].beyond_us == pytest.approx(found["gate"].delta_us - 29.0, abs=0.5)
    assert abs(found["norm"].beyond_us) < 3
    still = noise(before, after)
    assert still is not None and "take 1.290 times as long after" in still.words


def test_diff_of_many_equal_modules_seldom_calls_one_changed() -> None:
    """Two traces of one program, whose kernels are now and then late by much: an exponential."""
    drawn, alarms = random.Random(0), 0
    names = [f"part{i}" for i in range(20)]
    calls = [("", None), *((name, 0) for name in names)]
    for _ in range(200):
        sides = [
            kernel_rows(
                trace(
                    [
                        Did(name=name, call=at, time_us=100.0 + drawn.expovariate(0.5))
                        for at, name in enumerate(names, start=1)
                    ],
                    calls,
                )
            )
            for _ in range(2)
        ]
        alarms += any(d.status != "same" for d in diff(*sides))
    assert alarms <= 20  # a tenth; the scatter is itself a guess from 20


def test_diff_puts_other_kernels_first_also_where_they_take_as_long() -> None:
    found = diff(busy(), busy(swap="fused"))
    assert (found[0].module, found[0].status) == ("gate", "same")
    assert (found[0].appeared, found[0].vanished) == ({"fused_gate": 1}, {"gate": 1})
    page = diff_page.page(stack(("a",)), stack(("a",)), found, None)
    assert "Modules: 7 same, 1 of them with other kernels." in page


def test_diff_of_few_modules_says_that_any_difference_counts() -> None:
    before, after = stack(("a",)), stack(("a", "b"))
    assert noise(kernel_rows(before), kernel_rows(after)) is None
    page = diff_page.page(before, after, diff(kernel_rows(before), kernel_rows(after)), None)
    assert "Fewer than 5 modules launch the same kernels in both, so any difference counts." in page


def test_ambiguous_time_is_not_attributed() -> None:
    t = trace(
        [
            Did(name="a", call=0, time_us=30.0),
            Did(name="b", call=0, time_us=10.0, ambiguous=True),
            Did(name="c", call=0, time_us=10.0, source=None),
        ],
        [("", None)],
    )
    assert t.summary()["attributed_share"] == 0.6
    assert [k.name for k in t.ambiguous] == ["b"]


def test_more_than_the_memory_delivers_is_said_to_come_from_a_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for nbytes, said in ((9_000, False), (11_000, True)):
        step = trace([Did(name="k", call=0, time_us=10.0, reads=[(0, nbytes)])], [("", None)])
        rows = kernel_rows(replace(step, ceilings=CEILINGS))
        print_rows(rows, rows, None)
        assert ("part of the bytes came from a cache" in capsys.readouterr().out) is said
