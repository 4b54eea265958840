"""CuTe DSL's kernels for one token's experts: where they are offered, what fits, what they give."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

from optimized import experts_cute, gemv_engines
from optimized.expert_knobs import ExpertsKnobs
from optimized.experts_cute import keys_of
from optimized.gemv_engines import CUTE, OWN
from optimized.offline import cute_rows
from optimized.plan import Enabled, Plan, make_knobs
from optimized.routed_experts import CHANGE
from optimized.triton_support import DependentLaunch
from tests.optimized.kernel_checks import DEVICE, bf16, same_bits
from tests.optimized.test_routed_experts import assert_matches, choices, node, shares

KNOBS = {
    "up_rows": 1,
    "up_block": 256,
    "up_warps": 4,
    "up_stages": 5,
    "up_programs": 132,
    "down_rows": 8,
    "down_block": 64,
    "down_warps": 4,
    "down_held": 0,
    "engine": CUTE,
}
CUTE_KNOBS = ExpertsKnobs(**KNOBS)


def shape(slots=8, width=5120, inner=320, pairs=None) -> dict[str, int]:
    return {"P": pairs or slots, "K": slots, "E": 256, "D": width, "F": inner}


@pytest.fixture
def machine(monkeypatch):
    """Has the library, and compute capability 9.0 or what it is set to."""
    monkeypatch.setattr(experts_cute, "missing", lambda engine: None)

    def capable(*capability):
        monkeypatch.setattr(experts_cute, "capability", lambda: capability)

    capable(9, 0)
    return capable


def test_a_machine_without_the_library_has_the_choices_of_before(monkeypatch):
    monkeypatch.setattr(experts_cute, "capability", lambda: (9, 0))
    monkeypatch.setattr(experts_cute, "missing", lambda engine: "gone")
    found = ExpertsKnobs.candidates(shape())
    assert "engine" not in found and 132 not in found["up_programs"]
    assert ExpertsKnobs.heuristic(shape()).engine == OWN


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ({}, True),
        ({"slots": 1, "width": 256, "inner": 64}, True),
        ({"slots": 8, "pairs": 16}, False),  # two tokens
        ({"slots": 33}, False),  # one a lane
        ({"width": 5124}, False),  # 16 bytes
        ({"inner": 324}, False),
        ({"inner": 1032}, False),  # 17 pieces of hidden in a thread
    ],
    ids=str,
)
def test_it_is_offered_for_one_token_in_pieces_of_16_bytes(machine, sizes, taken):
    assert (ExpertsKnobs.candidates(shape(**sizes)).get("engine") == (OWN, CUTE)) is taken
    machine(8, 0)  # no copy engine
    assert "engine" not in ExpertsKnobs.candidates(shape(**sizes))


def test_knobs_that_say_nothing_have_one_value(machine):
    offered = ExpertsKnobs.candidates(shape())
    said = ("up_warps", "up_stages", "up_programs", "down_rows", "down_warps", "down_held")
    every = [dict(zip(said, v, strict=True)) for v in itertools.product(*map(offered.get, said))]
    found = [k for v in every if (k := replace(CUTE_KNOBS, **v)).is_valid(shape())]
    assert 100 < len(found) < 300
    pairs = {keys_of(shape(), k, pdl=True) for k in found}
    assert len(pairs) == len(found)
    for up, down in pairs:
        assert -(-up.programs // 132) * up.shared <= 220_000 and 2 <= up.stages
        assert down.shared <= 220_000
    others = {"up_rows": 2, "up_block": 512, "down_block": 128, "down_held": 1, "down_across": True}
    for name, value in others.items():
        assert not replace(CUTE_KNOBS, **{name: value}).is_valid(shape())
    assert not replace(CUTE_KNOBS, engine="tinygemm").is_valid(shape())


@pytest.mark.parametrize(
    ("values", "sizes", "fits"),
    [
        ({}, {}, True),
        ({"up_programs": 0}, {}, False),  # they loop
        ({"up_stages": 0}, {}, False),
        ({"up_stages": 11}, {}, False),  # 227 KB
        ({"up_programs": 264, "up_stages": 6}, {}, False),  # 248 KB on an SM
        ({"up_programs": 265, "up_stages": 2}, {}, False),  # three on an SM
        ({"up_warps": 1}, {}, False),  # 20 pieces of x in a thread
        ({"up_warps": 8}, {"width": 5152}, False),  # 644 columns a warp
        ({"down_rows": 16, "up_programs": 64}, {"slots": 1, "inner": 64}, True),
        ({"down_rows": 16, "up_programs": 65}, {"slots": 1, "inner": 64}, False),  # 64 rows
        ({"down_warps": 1}, {}, False),  # four of eight experts at a time
        ({"down_rows": 4}, {}, True),
        ({"down_rows": 1}, {}, False),  # two rows at a time
        ({"down_rows": 64}, {}, False),  # 328 KB
        ({"down_warps": 2, "down_rows": 2}, {}, True),
        ({"down_rows": 16, "up_programs": 64}, {"slots": 1}, True),
        ({"down_rows": 8, "up_programs": 64}, {"slots": 1}, False),  # 16 rows at a time
    ],
    ids=str,
)
def test_what_fits_the_kernels(values, sizes, fits):
    assert replace(CUTE_KNOBS, **values).is_valid(shape(**sizes)) is fits


def test_knobs_that_do_not_fit_are_refused_before_any_launch(machine, monkeypatch):
    launched = []
    monkeypatch.setattr(experts_cute, "compute", lambda *given: launched.append(given))
    forward = CHANGE.implementation("triton").build(node(4, 128, 16), CUTE_KNOBS)
    experts = choices(2, 2, 4)
    with pytest.raises(ValueError, match=r"'cutedsl'.* do not fit .*'P': 4.*; tune it again"):
        forward(bf16(2, 128), shares(experts), experts)
    assert not launched


@pytest.mark.skipif(DEVICE == "cuda", reason="for a machine that has no engine but ours")
@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (CUTE, "engine 'cutedsl' cannot run here: it needs a CUDA device; or take engine 'triton'"),
        ("tinygemm", "unknown engine 'tinygemm'; choose one of triton, cutedsl"),
    ],
)
def test_an_absent_engine_is_one_line(engine, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        CHANGE.implementation("triton").build(node(4, 64, 32), replace(CUTE_KNOBS, engine=engine))


def test_what_cannot_be_launched_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    reference, x, experts = node(4, 128, 64), bf16(1, 128), choices(1, 2, 4)
    up, down = reference.gate_up_proj, reference.down_proj
    given = x, shares(experts), experts
    with pytest.raises(ValueError, match="make one call before the capture"):
        experts_cute.compute(*given, up, down, x, 1.0, CUTE_KNOBS)
    moved = bf16(up.numel() + 1)[1:].view(up.shape)
    with pytest.raises(ValueError, match="takes weights that are 16-byte aligned"):
        experts_cute.compute(*given, moved, down, x, 1.0, CUTE_KNOBS)


def test_an_older_card_is_named(machine, monkeypatch):
    machine(8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(ValueError, match=r"compute capability 9\.0, this is NVIDIA A100; or take"):
        experts_cute.check(CUTE)


def test_a_plan_keeps_the_engine(tmp_path):
    knobs = {"D=5120,E=256,F=320,K=8,P=8": dict(KNOBS)}
    enabled = Enabled(name="routed_experts", backend="triton", knobs=knobs)
    Plan(model="beam", device="NVIDIA H200", changes=(enabled,)).save(tmp_path / "plan.toml")
    (loaded,) = Plan.load(tmp_path / "plan.toml").changes
    assert list(make_knobs(CHANGE, loaded).values()) == [CUTE_KNOBS]


def test_kernels_compile_without_a_gpu():
    """Up asks for nothing before it knows the experts, nor lets the next kernel start; down has
    asked for all of its weights by then."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    rows = {(row.kernel, row.target): row for row in cute_rows(["experts_cute"])}
    early = {"experts_up_cute_kernel": 0, "experts_down_cute_kernel": 8 + 8}  # with the experts
    assert set(rows) == set(itertools.product(early, ("sm_90", "sm_100")))
    for (kernel, _), row in rows.items():
        assert row.error is None and row.resources is not None
        assert row.resources.spills == 0 and row.resources.registers <= 128
        assert row.resources.loads_before_wait == early[kernel]
        assert row.resources.stores_before_wait == 0
    up, down = (case.binary("sm_90a")[1] for case in experts_cute.cute_cases())
    for ptx, first in ((up, "wait"), (down, "launch_dependents")):
        orders = re.findall(r"griddepcontrol\.(\w+)", ptx)
        assert sorted(orders) == ["launch_dependents", "wait"] and orders[0] == first
    assert up.count("cp.async.bulk.shared") == 2 * (5 + 1)  # two a stage, first and in the loop
    assert down.count("cp.async.bulk.shared") == 8
    assert up.count("div.rn.f32") == 1 and "div.full" not in up + down


def test_what_does_not_compile_is_an_error_of_the_engine():
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    key, _ = keys_of(shape(), replace(CUTE_KNOBS, up_stages=0), pdl=True)
    with pytest.raises(gemv_engines.CannotServe, match="cannot compile Key"):
        experts_cute.compiled(key, "--gpu-arch sm_90a")


def need_cute() -> None:
    if len(experts_cute.offered(shape())) == 1:
        pytest.skip("engine cutedsl: no library, or no card that copies rows by itself")


SIZES = {
    (8, 5120, 320): {},
    (4, 544, 40): {"up_programs": 7, "up_stages": 3, "down_rows": 64},
    (1, 416, 72): {"up_programs": 13, "up_stages": 2, "down_rows": 64, "down_warps": 8},
}


@pytest.mark.gpu
@pytest.mark.parametrize("early", [True, False], ids=["early", "in-order"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_the_reference_on_cuda(monkeypatch, sizes, early):
    need_cute()
    monkeypatch.setattr(DependentLaunch, "enabled", early)
    slots, width, inner = sizes
    knobs = replace(CUTE_KNOBS, **SIZES[sizes])
    reference, x, experts = node(16, width, inner), bf16(1, width), choices(1, slots, 16)
    assert_matches(reference, x, experts, knobs)
    forward = CHANGE.implementation("triton").build(reference, knobs)
    weights = shares(experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(x, weights, experts)
    for seed in range(3):
        x.copy_(bf16(1, width, seed=seed))
        experts.copy_(choices(1, slots, 16))
        graph.replay()
        assert same_bits(captured, forward(x, weights, experts))
        assert_matches(reference, x, experts, knobs)


@pytest.mark.gpu
def test_every_knob_gives_the_same_function_on_cuda():
    need_cute()
    reference, x, experts = node(16, 5120, 320), bf16(1, 5120), choices(1, 8, 16)
    offered = ExpertsKnobs.candidates(shape())
    said = ("up_warps", "up_stages", "up_programs", "down_rows", "down_warps")
    for name in said:
        for value in offered[name]:
            if (knobs := replace(CUTE_KNOBS, **{name: value})).is_valid(shape()):
                assert_matches(reference, x, experts, knobs)


@pytest.mark.gpu
def test_a_chain_of_early_starts_reads_what_the_one_before_wrote(monkeypatch):
    """Five layers in one graph, each of the result of the one before it."""
    need_cute()
    reference, first = node(16, 5120, 320), choices(1, 8, 16)
    forward = CHANGE.implementation("triton").build(reference, CUTE_KNOBS)
    weights, chosen = shares(first), [(first + i) % 16 for i in range(5)]

    def chain(x):
        for experts in chosen:
            x = forward(x, weights, experts)
        return x

    inputs = [bf16(1, 5120, seed=seed) for seed in range(8)]
    monkeypatch.setattr(DependentLaunch, "enabled", False)
    expected = [chain(x) for x in inputs]
    monkeypatch.setattr(DependentLaunch, "enabled", True)
    x = inputs[0].clone()
    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    for given, wanted in zip(inputs, expected, strict=True):
        x.copy_(given)
        graph.replay()
        assert same_bits(y, wanted) and y.any()
