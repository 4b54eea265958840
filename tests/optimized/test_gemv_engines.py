"""The engines of a few rows' product: which are offered, what fits them, and what they compute."""

import importlib.metadata
import itertools
import logging
import re
import sys
from collections import Counter
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from torch import nn

from optimized import gemv, gemv_cute, gemv_engines, launches, linear_decode
from optimized.change import share
from optimized.gemv import GemvKnobs
from optimized.gemv_engines import CUTE, LIBRARY, OWN, REGISTERS, SHARED, TINY
from optimized.offline import cute_rows
from optimized.peers.peer import peers
from optimized.plan import Enabled, Plan, apply_enabled, make_knobs
from optimized.triton_support import DependentLaunch
from reference import beam
from tests.optimized.kernel_checks import DEVICE, bf16, needs_kernels, same_bits
from tests.optimized.test_projection import assert_product, weight

SHAPES = [(1792, 5120), (5120, 768), (18992, 5120)]
PLAN = {"warps": 1, "rows": 1, "block": 256, "stages": 1}


def shape(rows: int, outputs: int, width: int) -> dict[str, int]:
    return {"M": rows, "O": outputs, "D": width}


def valid(sizes: dict[str, int]) -> list[GemvKnobs]:
    choices = GemvKnobs.candidates(sizes)
    every = (dict(zip(choices, v, strict=True)) for v in itertools.product(*choices.values()))
    return [knobs for values in every if (knobs := GemvKnobs(**values)).is_valid(sizes)]


@pytest.fixture
def all_engines(monkeypatch):
    monkeypatch.setattr(gemv_engines, "missing", lambda engine: None)
    monkeypatch.setattr(gemv_engines, "capability", lambda: (9, 0))


def test_a_machine_without_libraries_has_the_choices_of_before(monkeypatch):
    monkeypatch.setattr(gemv_engines, "missing", lambda engine: None if engine == OWN else "gone")
    for rows, warps in ((1, (1, 2, 4, 8)), (8, (2, 4, 8))):
        choices = GemvKnobs.candidates(shape(rows, 1792, 5120))
        assert set(choices) == {"warps", "rows", "block", "stages"}
        assert choices["warps"] == warps
    assert GemvKnobs(**PLAN).engine == OWN


@pytest.mark.parametrize(
    ("sizes", "engines"),
    [
        ((1, 1792, 5120), (OWN, CUTE, TINY, LIBRARY)),
        ((8, 1792, 5120), (OWN, CUTE, TINY, LIBRARY)),
        ((9, 1792, 5120), (OWN, CUTE, LIBRARY)),  # tinygemm's rows
        ((17, 1792, 5120), (OWN, LIBRARY)),
        ((1, 1790, 5120), (OWN, CUTE, LIBRARY)),  # tinygemm's 16 outputs
        ((1, 1792, 320), (OWN, TINY, LIBRARY)),  # 256 columns
        ((2, 1792, 320), (OWN, CUTE, TINY, LIBRARY)),  # 64
        ((2, 1792, 72), (OWN, LIBRARY)),
    ],
    ids=str,
)
def test_an_engine_is_offered_for_the_shapes_it_takes(all_engines, sizes, engines):
    assert GemvKnobs.candidates(shape(*sizes)).get("engine", (OWN,)) == engines


MUSE_SHAPES = [(2304, 8192), (8192, 1024), (4096, 1024), (25256, 8192)]
# Of the two heads; 25256 are no multiple of tinygemm's 16, and 16 rows too many for it.
FEW_ROWS_BEST = {(2, 18992): TINY, (8, 18992): TINY, (16, 18992): LIBRARY}
FEW_ROWS_BEST |= dict.fromkeys([(2, 25256), (8, 25256), (16, 25256)], LIBRARY)


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize(("outputs", "width"), SHAPES + MUSE_SHAPES, ids=str)
def test_the_heuristic_takes_the_fastest_engine_there_is(monkeypatch, rows, outputs, width):
    monkeypatch.setattr(gemv_engines, "capability", lambda: (9, 0))
    sizes = shape(rows, outputs, width)
    best = CUTE if rows == 1 else FEW_ROWS_BEST.get((rows, outputs), CUTE)
    for absent, expected in (((), best), ((CUTE, TINY), LIBRARY), ((CUTE, TINY, LIBRARY), OWN)):
        monkeypatch.setattr(
            gemv_engines, "missing", lambda e, gone=absent: "x" if e in gone else None
        )
        if rows == 1 and expected == LIBRARY:
            expected = OWN
        chosen = GemvKnobs.heuristic(sizes)
        fits = any(k.engine == CUTE for k in valid(sizes))
        assert chosen.engine == (expected if fits or expected != CUTE else LIBRARY)
        assert chosen.is_valid(sizes)
        if rows == 1 and expected == CUTE:
            assert chosen == GemvKnobs(warps=4, rows=4, block=256, stages=1, engine=CUTE)


@pytest.mark.parametrize(
    ("sizes", "engine"),
    [
        ((8, 1792, 5120), CUTE),
        ((8, 5120, 768), CUTE),
        ((8, 5120, 5120), TINY),
        ((8, 5120, 2560), LIBRARY),
        ((8, 18992, 5120), TINY),
        ((16, 18992, 5120), LIBRARY),
        ((1, 18992, 5120), CUTE),
    ],
    ids=str,
)
def test_large_weights_go_to_the_library_that_was_fastest(all_engines, sizes, engine):
    assert GemvKnobs.heuristic(shape(*sizes)).engine == engine


def test_no_warp_unrolls_more_chunks_than_compile_soon(all_engines):
    few = [k for k in valid(shape(8, 1792, 5120)) if k.engine == CUTE]
    assert {k.warps for k in few} == {4, 8, 16}


@pytest.mark.parametrize("width", [320, 16384, 32768])
def test_a_row_that_does_not_fit_the_cute_kernel_starts_from_ours(all_engines, width):
    """320 is no multiple of 256 columns, 16384 would be 64 loads in a thread's registers."""
    sizes = shape(1, 1792, width)
    assert GemvKnobs.heuristic(sizes) == GemvKnobs.own(sizes)
    assert GemvKnobs.own(sizes).engine == OWN and GemvKnobs.own(sizes).is_valid(sizes)


@needs_kernels
def test_without_knobs_what_is_not_aligned_is_ours(all_engines, monkeypatch):
    """Other engines load 16 bytes at a time, ours any values."""
    given = []
    monkeypatch.setattr(gemv_engines, "multiply", lambda x, w, y, knobs: given.append(knobs.engine))
    x, w = bf16(1, 1, 256), weight(24, 256)
    apart = torch.cat((w.flatten()[:1], w.flatten()))[1:].view(24, 256)
    assert apart.data_ptr() % 16 == 2
    assert_product(gemv.multiply(x, apart), x, w)
    assert given == []
    gemv.multiply(x, w)
    assert given == [CUTE]


def test_no_engine_is_tried_while_a_graph_is_captured(monkeypatch):
    """What fails there would be remembered."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="make one call before the capture"):
        gemv_engines.missing.__wrapped__(CUTE)


def test_weights_are_held_in_shared_memory_for_one_row_where_the_card_copies(monkeypatch):
    monkeypatch.setattr(gemv_engines, "missing", lambda engine: None)
    for rows, capability, holds in ((1, (9, 0), 2), (1, (8, 0), 1), (2, (9, 0), 1)):
        monkeypatch.setattr(gemv_engines, "capability", lambda found=capability: found)
        choices = GemvKnobs.candidates(shape(rows, 1792, 5120))
        assert len(choices.get("hold", (REGISTERS,))) == holds


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize(("outputs", "width"), SHAPES, ids=str)
def test_knobs_that_say_nothing_have_one_value(all_engines, rows, outputs, width):
    sizes = shape(rows, outputs, width)
    found = valid(sizes)
    counts = Counter((k.engine, k.hold) for k in found)
    assert counts[TINY, REGISTERS] == (rows <= 8)
    assert counts[OWN, REGISTERS] >= 60 and counts[CUTE, REGISTERS] >= 2
    assert counts[CUTE, SHARED] >= 10 * (rows == 1)
    assert counts[OWN, SHARED] == counts[TINY, SHARED] == 0
    made = [k for k in found if k.engine == CUTE]
    assert {k.stages for k in made} == {1 if rows == 1 else 2}
    held = [gemv_engines.pieces(sizes, k) for k in made]
    said = [k.block if rows == 1 else n for k, n in zip(made, held, strict=True)]
    keys = {(k.hold, k.warps, k.rows, n) for k, n in zip(made, said, strict=True)}
    assert len(keys) == len(made)
    for knobs, n in zip(made, held, strict=True):
        all_of_a_block = knobs.rows * width // (8 * 32 * knobs.warps)
        assert n == all_of_a_block if rows == 1 else 0 < n <= all_of_a_block
        if knobs.hold == REGISTERS:
            assert n * 4 * 32 * knobs.warps <= 65536 * 5 // 8
        assert gemv_engines.shared_bytes(sizes, knobs) <= 200_000


@pytest.mark.parametrize(
    ("rows", "values", "fits"),
    [
        (1, {"warps": 4, "rows": 2, "block": 1024}, True),
        (1, {"warps": 4, "rows": 2, "block": 2048}, False),  # no multiple of the width
        (1, {"warps": 4, "rows": 2, "block": 256}, False),  # four rows at a time
        (1, {"warps": 4, "rows": 16, "block": 1024}, False),  # too much to hold
        (1, {"warps": 8, "rows": 1, "block": 1024}, False),  # two rows at a time
        (1, {"warps": 8, "rows": 16, "block": 1024, "hold": SHARED}, True),
        (1, {"warps": 4, "rows": 32, "block": 512, "hold": SHARED}, False),  # 338 KB
        (1, {"warps": 4, "rows": 2, "block": 1024, "hold": "cache"}, False),
        (8, {"warps": 8, "rows": 16, "block": 64, "hold": SHARED}, False),
        (8, {"warps": 8, "rows": 16, "block": 64}, True),
        (8, {"warps": 8, "rows": 16, "block": 1024}, True),  # all 640 columns of a warp
        (8, {"warps": 8, "rows": 16, "block": 2048}, False),  # the same
        (8, {"warps": 8, "rows": 8, "block": 64}, False),  # no tile
        (8, {"warps": 8, "rows": 128, "block": 64}, False),  # too many sums and addresses
        (8, {"warps": 4, "rows": 16, "block": 1024}, False),  # too much to hold
    ],
    ids=str,
)
def test_what_fits_the_cute_kernel(rows, values, fits):
    knobs = GemvKnobs(**values, stages=1 if rows == 1 else 2, engine=CUTE)
    assert knobs.is_valid(shape(rows, 1792, 5120)) is fits


def test_knobs_that_do_not_fit_are_refused_before_any_launch():
    x, w = bf16(1, 1, 320), weight(16, 320)
    with pytest.raises(ValueError, match="engine='cutedsl'.* do not fit a product of .*'D': 320"):
        gemv.multiply(x, w, GemvKnobs(**PLAN, engine=CUTE))


@pytest.mark.skipif(DEVICE == "cuda", reason="for a machine that has no engine but ours")
@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (CUTE, "engine 'cutedsl' cannot run here: it needs a CUDA device; or take engine 'triton'"),
        (TINY, "engine 'tinygemm' cannot run here: it needs a CUDA device; or take .*"),
        ("cuda", "unknown engine 'cuda'; choose one of triton, cutedsl, tinygemm, library"),
    ],
    ids=[CUTE, TINY, "cuda"],
)
@pytest.mark.parametrize("name", ["linear_decode", "parallel_projection"])
def test_a_plan_that_names_an_absent_engine_is_one_line(name, engine, says):
    knobs = {"D=512,M=1,O=512": {**PLAN, "engine": engine}}
    model = share(beam.build(beam.configs["mini"], DEVICE, seed=0))
    with pytest.raises(ValueError) as raised:
        apply_enabled(model, Enabled(name=name, backend="triton", knobs=knobs))
    assert re.fullmatch(says, str(raised.value))


def test_a_library_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setitem(sys.modules, "cutlass", None)
    reason = gemv_engines.missing.__wrapped__(CUTE) or ""
    assert reason.startswith("cutlass cannot be used (") and reason.endswith("nvidia-cutlass-dsl")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    reason = gemv_engines.missing.__wrapped__(TINY)
    assert reason == "it needs compute capability 9.0, this is NVIDIA A100"


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.6.13", "flashinfer-python 0.6.13 has a kernel that may hang; install .*>=0.6.14"),
        ("0.6.13.post2", "flashinfer-python 0.6.13.post2 has .*"),
        ("0.6.14", None),
        ("0.7.0.post1", None),
    ],
)
def test_a_flashinfer_whose_kernel_hangs_is_not_called(monkeypatch, version, says):
    monkeypatch.setattr(importlib.metadata, "version", {"flashinfer-python": version}.__getitem__)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tried = []
    monkeypatch.setattr(gemv_engines, "unusable", lambda *_: tried.append(1))
    reason = gemv_engines.missing.__wrapped__(TINY)
    tiny = [p for p in peers() if "tinygemm" in p.name]
    assert [p.broken for p in tiny] == [gemv_engines.hangs] * 2
    if says is None:
        assert (reason, tried) == (None, [1])
    else:
        assert re.fullmatch(says, reason) and not tried
        assert re.fullmatch(says, gemv_engines.hangs())


def test_a_plan_keeps_the_engine(tmp_path):
    knobs = {"D=5120,M=1,O=1792": {**PLAN, "engine": CUTE}, "D=768,M=1,O=5120": dict(PLAN)}
    plan = Plan(
        model="beam",
        device="NVIDIA H200",
        changes=(Enabled(name="linear_decode", backend="triton", knobs=knobs),),
    )
    plan.save(tmp_path / "plan.toml")
    assert 'engine = "cutedsl"' in (tmp_path / "plan.toml").read_text()
    (enabled,) = Plan.load(tmp_path / "plan.toml").changes
    made = make_knobs(linear_decode.CHANGE, enabled)
    assert [k.engine for k in made.values()] == [CUTE, OWN]


class FakeFlashInfer(ModuleType):
    """The library's function, as its documentation describes it."""

    def __init__(self):
        super().__init__("flashinfer.gemm")
        self.calls = []

    def tinygemm_bf16(self, input, weight, out, bias=None, use_pdl=False):
        assert input.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
        assert input.shape[1] == weight.shape[1] and out.shape == (len(input), len(weight))
        self.calls.append((bias, use_pdl))
        out.copy_((input.double() @ weight.double().T).to(torch.bfloat16))


@pytest.fixture
def flashinfer(monkeypatch):
    fake = FakeFlashInfer()
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", fake)
    for cached in (gemv_engines._tinygemm_bf16, gemv_engines._zeros):
        cached.cache_clear()
    yield fake
    for cached in (gemv_engines._tinygemm_bf16, gemv_engines._zeros):
        cached.cache_clear()


def test_tinygemm_gets_rows_side_by_side_and_a_bias_that_is_there_already(flashinfer, monkeypatch):
    told = []

    def observer(kernel, arguments):
        told.append((kernel.__name__, kernel.library, len(arguments)))
        return nullcontext()

    monkeypatch.setattr(launches, "observers", [observer])
    x, w = bf16(1, 3, 512)[..., 256:], nn.Parameter(weight(48, 256), requires_grad=False)
    knobs = GemvKnobs(warps=2, rows=16, block=64, stages=2, engine=TINY)
    found = [gemv.multiply(x, w, knobs) for _ in range(2)]
    assert found[0].shape == (1, 3, 48)
    exact = (x.double() @ w.double().T).to(torch.bfloat16)
    assert same_bits(found[0], exact) and same_bits(found[1], exact)
    (bias, early), (again, _) = flashinfer.calls
    assert bias is again and bias.shape == (48,) and not bias.any()
    assert early is DependentLaunch.active()
    assert told == [("tinygemm_bf16", "FlashInfer", 3)] * 2


def test_offline_says_that_the_library_is_not_there(monkeypatch, caplog):
    def absent():
        raise ModuleNotFoundError("No module named 'cutlass'")

    monkeypatch.setattr(gemv_cute, "kernels", absent)
    with caplog.at_level(logging.WARNING, logger="optimized.offline"):
        assert list(cute_rows(["gemv_cute"])) == []
    assert caplog.messages == [
        "kernels of gemv_cute are left out: No module named 'cutlass'; install nvidia-cutlass-dsl"
    ]


def test_cute_kernels_compile_without_a_gpu():
    """All weights are asked for before the wait and nothing is written there; nothing spills."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    rows = {
        ((row.kernel, row.constexprs["D"]), row.target): row for row in cute_rows(["gemv_cute"])
    }
    one, shared, few = "gemv_cute_kernel", "gemv_cute_shared_kernel", "few_rows_cute_kernel"
    kernels = {(one, 5120): 20, (one, 8192): 32, (shared, 5120): 4, (few, 5120): 40}
    assert set(rows) == set(itertools.product(kernels, ("sm_90", "sm_100")))
    for (kernel, _), row in rows.items():
        assert row.error is None and row.resources is not None
        assert row.resources.spills == 0 and row.resources.registers <= 248
        assert row.resources.loads_before_wait == kernels[kernel]
        assert row.resources.stores_before_wait == 0
    for case in gemv_cute.cute_cases():
        _, ptx = case.binary("sm_90a")
        loads = re.findall(r"\bld\.global\S*", ptx)
        assert len(loads) == (0 if case.key.shared else kernels[case.kernel, case.key.width])
        assert all(".v4." in load for load in loads)
        assert ptx.count("griddepcontrol.launch_dependents") == 1


def test_what_does_not_compile_is_an_error_of_the_engine():
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    key = gemv_cute.Key(tiles=0, width=5120, rows=2, warps=4, block=2048, shared=False, pdl=True)
    with pytest.raises(gemv_engines.CannotServe, match="cannot compile Key"):
        gemv_cute.compiled(key, "--gpu-arch sm_90a")


def knobs_of(engine: str, hold: str, rows: int) -> GemvKnobs:
    if rows == 1:
        return GemvKnobs(**PLAN, engine=engine, hold=hold)
    if hold == SHARED:
        pytest.skip("for one row only")
    values = {"warps": 8, "block": 128} if engine == CUTE else {"warps": 2, "block": 64}
    return GemvKnobs(**values, rows=16, stages=2, engine=engine)


def need(engine: str) -> None:
    if (reason := gemv_engines.missing(engine)) is not None:
        pytest.skip(f"engine {engine}: {reason}")


ENGINES = [(CUTE, REGISTERS), (CUTE, SHARED), (TINY, REGISTERS), (LIBRARY, REGISTERS)]


@pytest.mark.gpu
@pytest.mark.parametrize("early", [True, False], ids=["early", "in-order"])
@pytest.mark.parametrize(("engine", "hold"), ENGINES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 8], ids="M{}".format)
@pytest.mark.parametrize(("outputs", "width"), SHAPES, ids=str)
def test_engines_on_cuda(monkeypatch, outputs, width, rows, engine, hold, early):
    need(engine)
    monkeypatch.setattr(DependentLaunch, "enabled", early)
    x, w = bf16(1, rows, width), weight(outputs, width)
    knobs = knobs_of(engine, hold, rows)
    found = gemv.multiply(x, w, knobs)
    assert_product(found, x, w, count=8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gemv.multiply(x, w, knobs)
    for seed in range(3):
        x.copy_(bf16(1, rows, width, seed=seed))
        graph.replay()
        assert same_bits(captured, gemv.multiply(x, w, knobs))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 16], ids="M{}".format)
def test_every_knob_of_every_engine_on_cuda(rows):
    need(CUTE)
    x, w = bf16(1, rows, 5120), weight(1800, 5120)  # the last block has rows that are none
    sizes = shape(rows, 1800, 5120)
    found = [knobs for knobs in valid(sizes) if knobs.engine != OWN]
    assert len(found) >= 2
    for knobs in found:
        assert_product(gemv.multiply(x, w, knobs), x, w, count=4)


@pytest.mark.gpu
@pytest.mark.parametrize(("engine", "hold"), ENGINES, ids=str)
@pytest.mark.parametrize("rows", [1, 8], ids="M{}".format)
def test_a_chain_of_early_starts_reads_what_the_one_before_wrote(engine, hold, rows):
    """Ten pairs of products in one graph, each of the result of the one before it."""
    need(engine)
    down, up = weight(768, 5120), weight(5120, 768)
    knobs = knobs_of(engine, hold, rows)

    def chain(x):
        for _ in range(10):
            x = gemv.multiply(gemv.multiply(x, down, knobs), up, knobs)
        return x

    x = bf16(1, rows, 5120)
    expected = []
    for seed in range(8):
        DependentLaunch.enabled = False
        try:
            expected.append(chain(bf16(1, rows, 5120, seed=seed)))
        finally:
            DependentLaunch.enabled = True
    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(x)
    for seed, wanted in enumerate(expected):
        x.copy_(bf16(1, rows, 5120, seed=seed))
        graph.replay()
        assert same_bits(captured, wanted)
