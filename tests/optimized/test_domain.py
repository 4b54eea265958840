"""The generated guard: inside the tested domain the kernel runs, one step outside the reference."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from optimized.change import Change, Contract, Implementation, apply_change, limit, share
from optimized.domain import Domain, alignment, domain_of, layout
from optimized.guards import Guard, argument_names, facts_of, limited
from optimized.plan import Enabled, Plan, apply_enabled

NAMES = "x", "scale", "mask", "factor", "causal"
WIDTH, TOKENS = 8, (1, 24)
EXTRA = 100.0  # what the "kernel" adds, so that it can be told from the reference


class Scaled(nn.Module):
    def forward(self, x, scale, mask, factor, causal):
        x = x * scale * factor
        return x if mask is None else x.masked_fill(mask, 0.0)


class Model(nn.Module):
    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(count))


def change(**given) -> Change:
    def build(node, knobs):
        return lambda *args: type(node).forward(node, *args) + EXTRA

    options = {"backend": "torch", "devices": ("cpu",), "build": build, **given}
    return Change(
        name="extra",
        region="scaled",
        summary="for tests",
        contract=Contract(numerics="exact"),
        implementations=(Implementation(**options),),
    )


def tensor(*sizes: int, dtype=torch.bfloat16, padded: int = 0, offset: int = 0) -> Tensor:
    """Ones, 16-byte aligned and `offset` elements on, rows `padded` elements apart."""
    if padded:
        return tensor(*sizes[:-1], sizes[-1] + padded, dtype=dtype)[..., : sizes[-1]]
    count = 1
    for size in sizes:
        count *= size
    room = torch.ones(count + 16, dtype=dtype)
    assert room.data_ptr() % 16 == 0
    return room[offset : offset + count].view(sizes)


def call(tokens: int, **given) -> tuple:
    """A call that the domain holds, with the arguments in `given` in place of its own."""
    inside = {
        "x": tensor(2, tokens, WIDTH),
        "scale": tensor(WIDTH),
        "mask": torch.zeros(2, tokens, 1, dtype=torch.bool),
        "factor": 2.0,
        "causal": True,
    }
    return tuple({**inside, **given}[name] for name in NAMES)


def domain(*calls: tuple, node: str = "layers.0") -> Domain:
    names = argument_names(Scaled())
    return domain_of((node, facts_of(names, args)) for args in calls)


def judged_on() -> Domain:
    few, many = TOKENS
    return domain(call(few), call(many), call(many, x=tensor(2, many, WIDTH, padded=8)))


class Watched:
    """A node limited to a domain, which kernel or reference served, and the lines it logged."""

    def __init__(self, within: Domain) -> None:
        self.model = Model()
        apply_change(self.model, change(), "torch", domain=within)

    def __call__(self, args: tuple) -> str:
        expected = Scaled()(*args)
        got = self.model.layers[0](*args)
        if torch.equal(got, expected):
            return "reference"
        assert torch.equal(got, expected + EXTRA)
        return "kernel"


@settings(max_examples=60, deadline=None)
@given(st.integers(*TOKENS), st.booleans(), st.integers(1, 3))
def test_calls_inside_run_the_kernel_however_often(tokens, padded, times):
    served = Watched(judged_on())
    args = call(tokens, x=tensor(2, tokens, WIDTH, padded=8 * padded))
    assert [served(args) for _ in range(times)] == ["kernel"] * times


def outside_calls(tokens: int) -> dict[str, tuple[tuple, str]]:
    """A call with one property outside, by that property; and what the guard says of it."""
    far, wide = TOKENS[1] + tokens, WIDTH + tokens
    rows = max(2, tokens)
    swapped = tensor(2, WIDTH, rows).transpose(1, 2)
    return {
        "longer": (call(far), f"x has {far} in dimension 1, tested 1 to 24"),
        "empty": (call(0), "x has 0 in dimension 1, tested 1 to 24"),
        "wider": (
            call(tokens, x=tensor(2, tokens, 1), scale=tensor(wide)),
            "x has 1 in dimension 2, tested 8",
        ),
        "weight": (
            call(1, scale=tensor(1)),
            "scale has 1 in dimension 0, tested 8",
        ),
        "rank": (call(tokens, scale=tensor(1, WIDTH)), "scale has 2 dimensions, tested 1"),
        "dtype": (
            call(tokens, x=tensor(2, tokens, WIDTH, dtype=torch.float32)),
            "x is float32 on cpu, tested bfloat16 on cpu",
        ),
        "layout": (
            call(rows, x=swapped),
            "x is order 0 2 1, tested contiguous and gaps around 2",
        ),
        "repeated": (
            call(rows, x=tensor(2, 1, WIDTH).expand(2, rows, WIDTH)),
            "x is repeated 1, tested contiguous and gaps around 2",
        ),
        "stride": (
            call(tokens, scale=tensor(2 * WIDTH)[::2]),
            "scale is strided, tested contiguous",
        ),
        "address": (
            call(tokens, scale=tensor(WIDTH, offset=1)),
            "scale lies at a multiple of 2 bytes, tested 16",
        ),
        "absent": (call(tokens, mask=None), "mask is None, tested with bool [2, 1 to 24, 1]"),
        "given": (call(tokens, factor=tensor(1)), "factor is a bfloat16 tensor, tested with 2.0"),
        "scalar": (call(tokens, factor=3.0), "factor is 3.0, tested 2.0"),
        "flag": (call(tokens, causal=False), "causal is False, tested True"),
        "kind": (call(tokens, causal=1), "causal is 1, tested with True"),
    }


@pytest.mark.parametrize("what", list(outside_calls(1)))
@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(*TOKENS), first=st.booleans())
def test_one_property_outside_runs_the_reference(what, tokens, first):
    served = Watched(judged_on())
    args, said = outside_calls(tokens)[what]
    if first:  # a call that was let through must not let this one through
        assert served(call(tokens)) == "kernel"
    assert served(args) == "reference"
    assert served(args) == "reference"
    guard = served.model.layers[0].forward.guard
    assert guard.outside(args).startswith(said)
    assert served(call(tokens)) == "kernel"


def test_what_was_outside_is_logged_once_for_all_nodes(caplog):
    model = Model(2)
    apply_change(model, change(), "torch", domain=judged_on())
    with caplog.at_level(logging.WARNING, logger="optimized.guards"):
        for layer in model.layers:
            for args in (call(30), call(30), call(31), call(2)):
                layer(*args)
    assert [record.getMessage() for record in caplog.records] == [
        "extra: the reference runs instead, outside what was tested: "
        f"x has {tokens} in dimension 1, tested 1 to 24"
        for tokens in (30, 31)
    ]


def test_the_kernel_s_own_guard_stays(caplog):
    def guard(node, x, *rest):
        return "one token" if x.shape[1] == 1 else None

    model = Model()
    apply_change(model, change(guard=guard), "torch", domain=judged_on())
    layer = model.layers[0]
    assert torch.equal(layer(*call(1)), Scaled()(*call(1)))
    assert torch.equal(layer(*call(2)), Scaled()(*call(2)) + EXTRA)
    assert layer.declines(*call(1)) == "one token"


def test_a_domain_can_be_set_later_and_holds_in_shared_trees():
    model = Model()
    apply_change(model, change(), "torch")
    layer = model.layers[0]
    assert torch.equal(layer(*call(30)), Scaled()(*call(30)) + EXTRA)
    limit(model, change(), judged_on())
    other = share(model)
    for tree in (model, other):
        assert torch.equal(tree.layers[0](*call(30)), Scaled()(*call(30)))
        assert torch.equal(tree.layers[0](*call(3)), Scaled()(*call(3)) + EXTRA)
    assert list(model.state_dict()) == []


def test_sizes_between_two_nodes_were_not_judged_on():
    narrow = [call(n) for n in (1, 9)]
    wide = [call(n, x=tensor(2, n, 16), scale=tensor(16)) for n in (1, 9)]
    names = argument_names(Scaled())
    both = domain_of(
        (node, facts_of(names, args)) for node, calls in (("a", narrow), ("b", wide))
        for args in calls
    )  # fmt: skip
    assert len(both.calls) == 2
    assert both.outside(facts_of(names, call(5))) is None
    between = call(5, x=tensor(2, 5, 12), scale=tensor(12))
    assert both.outside(facts_of(names, between)) == "x has 12 in dimension 2, tested 8"
    mixed = call(5, x=tensor(2, 5, 16))
    assert both.outside(facts_of(names, mixed)) is not None


def test_nodes_that_differ_in_nothing_fixed_have_one_domain():
    parts = [domain_of([(n, facts_of(NAMES, call(t)))]) for n, t in (("a", 1), ("b", 1))]
    assert parts[0] == parts[1]
    joint = domain_of(
        [(n, facts_of(NAMES, call(t))) for n in ("a", "b") for t in (1, 4 if n == "a" else 7)]
    )
    (only,) = joint.calls
    assert only.arguments["x"].sizes == ((2, 2), (1, 7), (8, 8))


calls = st.builds(
    lambda tokens, padded, offset, factor, bare: call(
        tokens,
        x=tensor(2, tokens, WIDTH, padded=padded),
        scale=tensor(WIDTH, offset=offset),
        factor=factor,
        **({"mask": None} if bare else {}),
    ),
    st.integers(0, 40),
    st.sampled_from([0, 8]),
    st.sampled_from([0, 1, 8]),
    st.sampled_from([1.0, 2.0, 3]),
    st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(calls, min_size=1, max_size=6), calls)
def test_a_domain_holds_its_calls_and_a_range_between_them(inside, other):
    within = domain(*inside)
    for args in inside:
        assert within.outside(facts_of(NAMES, args)) is None
    alike = [
        args[0].shape[1]
        for args in inside
        if type(args[3]) is type(other[3])
        and args[3] == other[3]
        and (args[2] is None) == (other[2] is None)
    ]
    tokens = other[0].shape[1]
    admitted = within.outside(facts_of(NAMES, other)) is None
    if not alike or not min(alike) <= tokens <= max(alike):
        assert not admitted


@pytest.mark.gpu
def test_a_guarded_call_can_be_captured_and_replays_the_kernel():
    """Host code runs at capture only, and nothing in the guard breaks one."""
    called = []

    def kernel(*args):
        called.append(args)
        return Scaled()(*args) + EXTRA

    node = Scaled().cuda()
    args = tuple(a.cuda() if isinstance(a, Tensor) else a for a in call(4, mask=None))
    guarded = limited(kernel, node, domain(args), "captured")
    for _ in range(2):  # the slow way, then the quick one
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            out = guarded(*args)
        for value in (1.0, 5.0):
            args[0].fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, torch.full_like(out, 2 * value + EXTRA))
    assert len(called) == 2


def test_nested_arguments_are_looked_into():
    class Nested(nn.Module):
        def forward(self, x, cache, *weights):
            return x

    node = Nested()
    cache = SimpleNamespace(k=tensor(3, 4), window=None, extent=5)
    args = (tensor(2), cache, tensor(4), tensor(6))
    facts = facts_of(argument_names(node), args)
    assert list(facts) == ["x", "cache.k", "cache.window", "cache.extent", "weights[0]",
                           "weights[1]"]  # fmt: skip
    within = domain_of([("n", facts)])
    guarded = limited(lambda *args: "kernel", node, within, "nested")
    assert [guarded(*args) for _ in range(3)] == ["kernel"] * 3
    assert len(guarded.guard.known) == 1  # two were let through by the quick test
    cache.extent = 6
    assert guarded(*args) is args[0]
    assert guarded.guard.outside(args) == "cache.extent is 6, tested 5"
    assert guarded(*args[:3]) is args[0]
    assert guarded.guard.outside(args[:3]) == "weights[1] is absent, tested with it"
    cache.extent = 5
    more = (*args, tensor(6))
    assert guarded.guard.outside(more) == "weights[2] is given, tested without it"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=4))
def test_layouts_tell_contiguous_from_gaps(sizes, gaps):
    gaps = (gaps + [0] * len(sizes))[: len(sizes)]
    room = torch.zeros([n + g for n, g in zip(sizes, gaps, strict=True)])
    view = room[tuple(slice(n) for n in sizes)]
    assert (layout(tuple(view.shape), view.stride()) == "contiguous") == view.is_contiguous()


def test_layouts_and_alignments_by_name():
    x = torch.zeros(2, 3, 4)
    assert layout((3, 2, 4), x.transpose(0, 1).stride()) == "order 1 0 2"
    assert layout((2, 3, 2), x[..., :2].stride()) == "gaps around 2"
    assert layout((2, 3, 2), x[..., ::2].stride()) == "strided"
    assert layout((2, 3, 5), (3, 1, 0)) == "repeated 2"
    assert layout((2, 1, 5), (10, 10, 1)) == layout((2, 3, 5), (30, 10, 1)) == "gaps around 2"
    assert layout((2, 0, 5), (7, 7, 7)) == "contiguous"
    assert [alignment(n) for n in (0, 2, 8, 48, 96, 4096)] == [16, 2, 8, 16, 16, 16]


def test_a_domain_survives_json_and_a_plan(tmp_path):
    within = judged_on()
    assert Domain.from_json(json.loads(json.dumps(within.to_json()))) == within
    line = Enabled(name="inductor:scaled", backend="inductor", domain=within)
    plan = Plan(model="m", device="d", changes=(line, Enabled(name="b", backend="torch")))
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan


def test_a_plan_applies_its_domain(caplog):
    model = Model()
    apply_enabled(
        model, Enabled(name="inductor:scaled", backend="inductor", domain=domain(call(24)))
    )
    with caplog.at_level(logging.WARNING, logger="optimized.guards"):
        assert torch.equal(model.layers[0](*call(2)), Scaled()(*call(2)))
    assert "inductor:scaled: the reference runs instead" in caplog.text
    assert "x has 2 in dimension 1, tested 24" in caplog.text


NO_DOMAINS = (
    3,
    {"x": 1},
    [[]],
    [{"x": {}}],
    [{"x": {"kind": "no"}}],
    [{"x": {"kind": "tensor", "nope": 1}}],
    [{"x": {"kind": "tensor", "sizes": [[1]]}}],
)


@pytest.mark.parametrize("data", NO_DOMAINS, ids=str)
def test_what_is_no_domain_is_refused(data):
    with pytest.raises(ValueError, match="not a domain"):
        Domain.from_json(data)


def test_a_plan_with_a_broken_domain_is_one_line(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(
        'model = "m"\ndevice = "d"\n[[change]]\nname = "a"\nbackend = "b"\ndomain = 3\n'
    )
    with pytest.raises(ValueError, match="is not a plan .not a domain") as caught:
        Plan.load(path)
    assert "\n" not in str(caught.value)


def test_a_zero_s_sign_is_told_apart_however_often():
    served = Watched(domain(call(2, factor=0.0)))
    for _ in range(2):
        assert served(call(2, factor=0.0)) == "kernel"
        assert served(call(2, factor=-0.0)) == "reference"


def test_nothing_tested_admits_nothing():
    guard = Guard(Scaled(), Domain(()))
    assert guard.outside(call(1)) == "no call was tested"
