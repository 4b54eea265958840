"""Library engines of prefill attention: which are offered, what they are asked, what is refused; on
a GPU their results."""

import contextlib
import math
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from optimized import launches, prefill_engines
from optimized.change import shape_key
from optimized.gemv_engines import CannotServe
from optimized.plan import Enabled, apply_enabled
from optimized.prefill_attention import PrefillKnobs, build, shape
from optimized.prefill_engines import ENGINES, LIBRARIES, attend, missing
from reference.beam import PrefillAttend
from tests.optimized.kernel_checks import same_bits
from tests.optimized.test_prefill_attention import arguments, assert_matches, causal, ring, rounded

FULL = {"B": 8, "T": 2048, "S": 100_000, "G": 6, "d": 128, "masked": 0}
FAKES = "cudnn", "flashinfer"


def function(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """What a library computes, for [B, T, H, d], [B, S, Hkv, d] in whatever layout."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    return rounded(q, k, v, causal(q.shape[0], q.shape[1], k.shape[1]), scale)


class Graph:
    """cuDNN's, of one attention; it reads memory as the graph's dimensions and strides say."""

    built = 0

    def __init__(self, **kinds):
        self.handle = kinds["handle"]

    def tensor(self, name, dim, stride, data_type):
        return name, (dim, stride)

    def sdpa(self, q, k, v, *, attn_scale, diagonal_alignment, diagonal_band_right_bound, **rest):
        assert (diagonal_alignment, diagonal_band_right_bound) == ("lower right", 0)
        assert rest["generate_stats"] is False
        self.operands, self.scale, self.out = (q, k, v), attn_scale, Output()
        return self.out, None

    def build(self, modes):
        type(self).built += 1

    def get_workspace_size(self):
        return 0

    def execute(self, places, workspace, handle):
        assert handle == self.handle and workspace.numel() == 1
        found = (places[x].as_strided(*x[1]).transpose(1, 2) for x in self.operands)
        target = places[self.out].as_strided(self.out.dim, self.out.stride)
        target.copy_(function(*found, self.scale).transpose(1, 2))


class Output:
    def set_output(self, value):
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self


class Wrapper:
    """FlashInfer's, over pages."""

    built = 0

    def __init__(self, workspace, layout, backend):
        assert (layout, backend) == ("NHD", "fa3") and workspace.dtype == torch.uint8

    def plan(self, queries, pages, order, last, heads, kv_heads, dim, page, *, causal, **rest):
        assert causal and rest["q_data_type"] == rest["kv_data_type"] == torch.bfloat16
        self.plan_of = queries, pages, order, last, (heads, kv_heads, dim, page), rest["sm_scale"]
        type(self).built += 1

    def run(self, q, cache, out):
        queries, pages, order, last, sizes, scale = self.plan_of
        k, v = cache
        assert sizes == (q.shape[1], k.shape[2], k.shape[3], k.shape[1])
        assert k.stride() == v.stride()
        for i in range(len(last)):
            rows = slice(queries[i], queries[i + 1])
            (page,) = order[pages[i] : pages[i + 1]].tolist()
            seen = (x[page, : last[i]][None] for x in (k, v))
            out[rows] = function(q[rows][None], *seen, scale)[0]


@pytest.fixture
def libraries(monkeypatch):
    """Both libraries as they are called, computing on the CPU."""
    cudnn, flashinfer, prefill = (ModuleType(n) for n in ("cudnn", "flashinfer", "prefill"))
    cudnn.__dict__.update(
        pygraph=Graph,
        data_type=SimpleNamespace(BFLOAT16="bf16", FLOAT="fp32"),
        diagonal_alignment=SimpleNamespace(BOTTOM_RIGHT="lower right"),
        heur_mode=SimpleNamespace(A="a", FALLBACK="fallback"),
        cudnnGraphNotSupportedError=type("NotSupported", (Exception,), {}),
        create_handle=object,
        set_stream=lambda handle, stream: None,
    )
    prefill.__dict__.update(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    flashinfer.__dict__.update(prefill=prefill)
    named = {"cudnn": cudnn, "flashinfer": flashinfer, "flashinfer.prefill": prefill}
    for name, module in named.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(prefill_engines, "missing", lambda engine: None)
    monkeypatch.setattr(prefill_engines, "_PLANS", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    Graph.built = Wrapper.built = 0
    return cudnn


def on_cpu(*args, **kwargs):
    """q, k, v of `arguments`, on the CPU: views of a cache with a slot more."""
    return tuple(x.cpu() if i == 0 else _spare(x) for i, x in enumerate(arguments(*args, **kwargs)))


def _spare(x: Tensor) -> Tensor:
    room = torch.full((x.shape[0], x.shape[1] + 1, *x.shape[2:]), math.nan, dtype=x.dtype)
    room[:, :-1] = x.cpu()
    return room[:, :-1]


@pytest.mark.parametrize("engine", FAKES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (4, 2)])
def test_a_library_is_asked_for_the_references_function(libraries, engine, heads, kv_heads):
    """Keys are read in the cache: the slot after a sequence's last holds NaN."""
    q, k, v = on_cpu(3, 5, heads, kv_heads, 64, 20)
    found = attend(engine, q, k, v, None, 0.2)
    assert found.shape == q.shape and found.is_contiguous()
    assert same_bits(found, function(q, k, v, 0.2))


@pytest.mark.parametrize(("engine", "fake"), [("cudnn", Graph), ("flashinfer", Wrapper)])
def test_a_shape_is_planned_once(libraries, engine, fake):
    q, k, v = on_cpu(2, 5, 6, 1, 64, 20)
    first = attend(engine, q, k, v, None, 0.2)
    again = attend(engine, -q, k, v, None, 0.2)
    assert fake.built == 1 and not same_bits(first, again)
    attend(engine, q, k[:, :19], v[:, :19], None, 0.2)
    attend(engine, q, k, v, None, 0.3)
    assert fake.built == 3


@pytest.mark.parametrize(("engine", "library"), [("cudnn", "cuDNN"), ("flashinfer", "FlashInfer")])
def test_a_trace_is_told_whose_kernel_it_is(libraries, monkeypatch, engine, library):
    told = []

    def note(kernel, given):
        told.append((kernel.library, *given))
        return contextlib.nullcontext()

    monkeypatch.setattr(launches, "observers", [note])
    args = on_cpu(2, 5, 6, 1, 64, 20)
    found = attend(engine, *args, None, 0.2)
    ((name, *given),) = told
    assert name == library
    assert all(a is b for a, b in zip(given, (*args, found), strict=True))


def test_planning_is_no_part_of_a_graph(libraries, monkeypatch):
    q, k, v = on_cpu(2, 5, 6, 1, 64, 20)
    attend("cudnn", q, k, v, None, 0.2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attend("cudnn", q, k, v, None, 0.2)
    with pytest.raises(ValueError, match="one call before the capture"):
        attend("flashinfer", q, k, v, None, 0.2)


def test_what_a_library_cannot_plan_is_said(libraries, monkeypatch, caplog):
    def fail(self, modes):
        raise libraries.cudnnGraphNotSupportedError("no kernel\nof many lines")

    monkeypatch.setattr(Graph, "build", fail)
    with pytest.raises(CannotServe, match=r"^engine 'cudnn' cannot plan .*: no kernel$"):
        attend("cudnn", *on_cpu(2, 5, 6, 1, 64, 20), None, 0.2)
    assert "no kernel" in caplog.text


def test_calls_that_no_library_takes(libraries):
    q, k, v = on_cpu(2, 5, 6, 1, 64, 20)
    for engine in FAKES:
        with pytest.raises(ValueError, match="takes no mask; take engine 'triton'"):
            attend(engine, q, k, v, causal(2, 5, 20).cpu(), 0.2)
        with pytest.raises(ValueError, match="21 queries at the end of 20 positions"):
            attend(engine, *on_cpu(2, 21, 6, 1, 64, 20), None, 0.2)
        with pytest.raises(ValueError, match="head dimension 32"):
            attend(engine, *on_cpu(2, 5, 6, 1, 32, 20), None, 0.2)
        with pytest.raises(ValueError, match="multiples of 8"):
            odd = torch.zeros(2, 20, 1, 65, dtype=torch.bfloat16)[..., :64]
            attend(engine, q, odd, odd, None, 0.2)
        with pytest.raises(ValueError, match="16-byte aligned"):
            odd = torch.zeros(2 * 20 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 20, 1, 64)
            attend(engine, q, odd, odd, None, 0.2)
    with pytest.raises(ValueError, match="equal ones"):
        attend("flashinfer", q, k, v.contiguous(), None, 0.2)
    attend("cudnn", q, k, v.contiguous(), None, 0.2)


def test_engines_are_offered_where_they_are_and_fit(monkeypatch):
    def names(**changed):
        return PrefillKnobs.candidates({**FULL, **changed})["engine"]

    monkeypatch.setattr(prefill_engines, "missing", lambda engine: None)
    assert names() == names(d=64) == ENGINES == ("triton", "cudnn", "flashinfer")
    assert names(masked=1) == names(d=256) == ("triton",)
    monkeypatch.setattr(prefill_engines, "missing", {"cudnn": "no", "triton": None}.get)
    assert names() == ("triton", "flashinfer")
    monkeypatch.setattr(prefill_engines, "missing", {"cudnn": "no", "flashinfer": "no"}.get)
    assert names() == ("triton",)


def test_an_engine_is_one_choice_among_the_knobs():
    start = PrefillKnobs.heuristic(FULL)
    assert start.engine == "triton"
    for engine in LIBRARIES:
        chosen = replace(start, engine=engine)
        assert chosen.is_valid(FULL)
        assert not replace(chosen, rows=64).is_valid(FULL)
        assert not chosen.is_valid({**FULL, "d": 256})
        masked = {**FULL, "masked": 1}
        assert not replace(PrefillKnobs.heuristic(masked), engine=engine).is_valid(masked)


def test_a_plan_with_an_absent_engine_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(prefill_engines, "missing", {"cudnn": "cudnn cannot be imported"}.get)
    model = torch.nn.Sequential(PrefillAttend(0.2))

    def planned(engine):
        knobs = {**vars(PrefillKnobs.heuristic(FULL)), "engine": engine}
        line = Enabled(name="prefill_attention", backend="triton", knobs={shape_key(FULL): knobs})
        apply_enabled(model, line)

    with pytest.raises(ValueError) as caught:
        planned("cudnn")
    assert str(caught.value) == (
        "engine 'cudnn' cannot run here: cudnn cannot be imported; or take engine 'triton'"
    )
    with pytest.raises(ValueError, match="unknown engine 'cute'; choose one of triton, cudnn, fl"):
        planned("cute")
    planned("flashinfer")


def test_why_an_engine_is_missing(monkeypatch):
    why = missing.__wrapped__
    assert why("triton") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why("cudnn") == "it needs a CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA B200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert "Hopper GPUs only, this is NVIDIA B200" in why("cudnn")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for engine, module in LIBRARIES.items():
        monkeypatch.setitem(sys.modules, module, None)
        assert re.match(rf"{module} cannot be used \(.*\); install ", why(engine) or "")
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    tried = []
    monkeypatch.setattr(prefill_engines, "_try", tried.append)
    assert why("cudnn") is None and why("flashinfer") is None
    assert tried == ["cudnn", "flashinfer"]

    def fail(engine):
        raise RuntimeError("no nvcc\nin three places")

    monkeypatch.setattr(prefill_engines, "_try", fail)
    assert why("flashinfer") == (
        "flashinfer.prefill cannot be used (no nvcc); install flashinfer-python"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("engine", LIBRARIES)
@pytest.mark.parametrize(
    ("batch", "steps", "heads", "kv_heads", "dim", "length"),
    [(2, 2048, 6, 1, 128, 10_000), (1, 300, 8, 1, 64, 4_097), (3, 130, 4, 2, 128, 130)],
)
def test_engine_on_cuda(engine, batch, steps, heads, kv_heads, dim, length):
    if (reason := missing(engine)) is not None:
        pytest.skip(reason)
    args = arguments(batch, steps, heads, kv_heads, dim, length)
    sizes = shape(None, *args, None)
    knobs = replace(PrefillKnobs.heuristic(sizes), engine=engine)
    found = assert_matches(args, None, knobs, count=4)
    forward = build(PrefillAttend(dim**-0.5), knobs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(*args, None)
    args[0].neg_()
    graph.replay()
    assert same_bits(captured, forward(*args, None)) and not same_bits(captured, found)
    with pytest.raises(ValueError, match="takes no mask"):
        forward(*args, ring(batch, steps, length - steps, length))
