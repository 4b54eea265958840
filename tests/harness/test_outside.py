"""What is timed in a worker: values, positions and caches that nobody can foresee, one of the timed
bursts audited."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import outside
from harness.bench import ImpossibleTimeError
from harness.burst_audit import BurstAudit, Draws, step_draws
from harness.confine import Limits
from harness.outside import latency
from harness.records import Ceilings
from harness.sandbox import Sandbox
from harness.trees import leaves, same_bits
from harness.workload import Workload
from tests.harness.judged import toy

REMEMBERS = """
from optimized.change import Change, Contract, Implementation

def build(node, _):
    calls, kept = [0], {}

    def forward(x, positions, store):
        calls[0] += 1
        if positions.shape[1] == 1 and calls[0] > 1:
            WHAT
        return node.forward(x, positions, store)

    return forward

CHANGE = Change(
    name="remembers", region="mix", summary="uses what it saw before",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu",), build=build),),
)
"""
POSITIONS = "positions = kept.setdefault('at', positions.clone())"
CONTENTS = "store = {n: t.copy_(kept.setdefault(n, t.clone())) for n, t in store.items()}"


def test_a_step_s_positions_and_caches_are_drawn_too() -> None:
    target = toy().target("decode-bs1")
    draws, others = step_draws(toy(), target, 8), step_draws(toy(), target, 8)
    seen = []
    for drawn in (draws, draws, others):
        drawn.positions()
        drawn.values()
        ids, at, cache = zip(*drawn.slots, strict=True)
        held = torch.cat([t.flatten() for _, t in leaves(cache[0])])
        seen.append((torch.cat(ids), torch.cat(at), held.clone()))
    for i, other in ((0, 1), (0, 2), (1, 2)):
        for a, b in zip(seen[i], seen[other], strict=True):
            assert not torch.equal(a, b)
    at = torch.cat([s[1] for s in seen])
    assert target.context * 15 // 16 <= int(at.min()) and int(at.max()) < target.context
    draws.seed(5)
    draws.values()
    first = draws.slots[0][0].clone()
    draws.seed(5)
    draws.values()
    assert torch.equal(first, draws.slots[0][0])  # the recorded seed gives them again


def test_the_audited_burst_is_any_of_the_timed_ones() -> None:
    x = torch.zeros(4)
    draws = Draws(slots=[(x,)], redraw=lambda g: x.normal_(generator=g))
    seen: list[int] = []
    ran: list[torch.Tensor] = []
    fresh = SimpleNamespace(call=lambda node, args, kwargs: (args[0] * 2,))
    for _ in range(60):
        ran.clear()

        def burst(count: int, *, hold: bool) -> tuple[float, Any]:
            ran.append(x.clone())
            return float(len(ran)), x * 2

        timed: Any = SimpleNamespace(
            draws=draws,
            slots=draws.slots,
            node="",
            burst=burst,
            order=lambda n: [0] * n,
            held=[],
        )
        audit = BurstAudit(timed, fresh, 4, "decode")  # type: ignore[arg-type]
        assert [audit.burst(3) for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]  # its time counts
        audited = audit.check()
        assert audited.reason is None
        again = torch.zeros(4).normal_(generator=torch.Generator().manual_seed(audited.seed))
        (place,) = [i for i, value in enumerate(ran) if same_bits(value, again)]
        seen.append(place)
    assert set(seen) == {0, 1, 2, 3}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """One for all candidates here, each in a worker of its own."""
    with Sandbox(toy().model, toy().device, model=toy().name, limits=Limits()) as sandbox:
        yield sandbox


@pytest.mark.parametrize("what", ["honest", "positions", "contents"])
def test_what_a_timed_decode_remembers_is_named(
    what: str, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "SLOPE_S", 0.02)
    monkeypatch.setattr("harness.burst_audit.secrets.randbelow", lambda n: n - 1)
    seeds = itertools.count(1)  # so that the second block's position is another one
    monkeypatch.setattr("harness.burst_audit.secrets.randbits", lambda _: next(seeds))
    monkeypatch.setattr(outside, "BLOCKS", 2)
    line = {"honest": "pass", "positions": POSITIONS, "contents": CONTENTS}[what]
    path = tmp_path / "remembers.py"
    path.write_text(REMEMBERS.replace("WHAT", line))
    targets = ("decode-bs1", "prefill-8x2048")
    candidate = sandbox.open(str(path))
    times, audit = latency(sandbox, candidate, str(path), None, toy(), targets)
    findings = candidate.close()
    assert [(c.step, c.when) for c in audit.calls] == [
        ("decode", "among the timed calls"),
        ("prefill", "among the timed calls"),
    ]
    assert times.decode.pairs == 2 and len({c.seed for c in audit.calls}) == 2
    if what == "honest":
        assert audit.reason is None and findings == []
    else:
        assert audit.calls[0].reason is not None and audit.calls[1].reason is None
        assert "what was timed" in findings[0] and findings[0].startswith("decode, among")


def test_a_step_below_its_floor_is_an_error_in_the_sandbox_too(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "SLOPE_S", 0.005)
    monkeypatch.setattr(outside, "BLOCKS", 1)
    monkeypatch.setattr("harness.floors.measure_ceilings", lambda device: SLOW)
    path = tmp_path / "honest.py"
    path.write_text(REMEMBERS.replace("WHAT", "pass"))
    candidate = sandbox.open(str(path))
    small = toy().target("decode-bs1")
    monkeypatch.setattr(Workload, "toy", False)
    monkeypatch.setattr(Workload, "target", lambda self, name: small)
    with pytest.raises(ImpossibleTimeError, match="in the sandbox, took .* need .* on a snail"):
        latency(sandbox, candidate, str(path), None, toy(), ("decode-bs1",))
    candidate.close()


SLOW = Ceilings(
    device_name="a snail",
    read_gb_per_s=1e-6,
    copy_gb_per_s=1e-6,
    bf16_tflop_per_s=1.0,
    fp32_tflop_per_s=1.0,
    launch_us=1.0,
)
