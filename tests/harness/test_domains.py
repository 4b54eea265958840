"""The steps that are timed are judged, too, and what was judged is the domain."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from harness.domains import judge_with_domain
from harness.examine import Examination, Prepared
from harness.records import Verdict
from harness.trees import clone
from harness.workload import Workload
from optimized.change import Change, Contract, limit, nodes
from optimized.domain import layout
from tests.harness.judged import change, changed, mini

TARGETS = "decode-bs1", "prefill-8x2048"
LOWEST = torch.finfo(torch.float32).min
LONG = 64  # tokens of a toy's timed prefill; the judge's own cases are shorter


def swiglu(node: Any) -> Callable[..., Any]:
    return lambda gate, up: (F.silu(gate.float()) * up.float()).to(gate.dtype)


def is_long(gate: torch.Tensor) -> bool:
    return gate.ndim == 3 and gate.shape[1] == LONG


def made(build: Callable[..., Any], guard: Callable[..., str | None] | None = None) -> Change:
    found = change("swiglu", build, Contract(numerics="transcendental"))
    only = dataclasses.replace(found.implementations[0], guard=guard)
    return dataclasses.replace(found, implementations=(only,))


def judged(given: Change) -> tuple[Verdict, Any]:
    candidate = changed(mini(), given)
    verdict = judge_with_domain(mini().model, candidate, given, "torch", mini(), 1, targets=TARGETS)
    return verdict, candidate


def longest(verdict: Verdict) -> int:
    """The most tokens that a dense layer's call may have."""
    assert verdict.domain is not None
    gates = [call.arguments["gate"] for call in verdict.domain.calls]
    return max(gate.sizes[1][1] for gate in gates if len(gate.sizes) == 3)


def ran(candidate: Any, given: Change, name: str, caplog: Any) -> tuple[int, int]:
    """Of the region's nodes in a step of the target: how many there are, and how many calls the
    reference served, by the log."""
    inputs = mini().inputs(mini().target(name))
    with caplog.at_level(logging.WARNING), torch.no_grad():
        candidate(*inputs.args)
    return len(nodes(mini().model, given.region)), len(caplog.records)


def test_timed_steps_lie_in_the_domain_and_run_the_kernel(caplog):
    given = made(swiglu)
    verdict, candidate = judged(given)
    assert verdict.passed, verdict.reason
    assert verdict.targets == TARGETS
    assert [o.output for o in verdict.outputs][1:] == [f"{name}: out" for name in TARGETS]
    assert verdict.outputs[2].elements > 8 * LONG * 64
    assert longest(verdict) == LONG
    limit(candidate, given, verdict.domain)
    for name in TARGETS:
        assert ran(candidate, given, name, caplog)[1] == 0
    _, outside = ran(candidate, given, "decode-bs128", caplog)
    assert outside == len({r.getMessage() for r in caplog.records}) > 0
    assert "by-hand" not in caplog.text
    assert "the reference runs instead, outside what was tested: gate has 128 in" in caplog.text


def test_a_kernel_that_is_wrong_at_the_timed_size_alone_is_refused():
    def build(node):
        plain = swiglu(node)
        return lambda gate, up: plain(gate, up) * (1 + is_long(gate) / 64)

    verdict, _ = judged(made(build))
    assert not verdict.passed
    reason = str(verdict.reason)
    assert reason.startswith("prefill-8x2048: out: ")
    assert "elements differ from the contract's replay" in reason
    assert reason.endswith("mlp.activate, prefill-8x2048: 100.000%")
    assert verdict.domain is None


def test_a_kernel_that_is_short_of_a_token_at_the_timed_size_is_refused():
    def build(node):
        plain = swiglu(node)

        def forward(gate, up):
            out = plain(gate, up)
            return out[:, :-1].contiguous() if is_long(gate) else out

        return forward

    verdict, _ = judged(made(build))
    reason = str(verdict.reason)
    assert reason.startswith("returns out as bfloat16 (8, 63, ")
    assert "prefill-8x2048)" in reason


def test_what_the_kernel_declines_is_noted_and_not_in_the_domain():
    def guard(node, gate, up):
        return "too long" if is_long(gate) else None

    verdict, _ = judged(made(swiglu, guard))
    assert verdict.passed, verdict.reason
    assert "prefill-8x2048: the reference runs, its kernel declines: too long" in verdict.notes
    assert longest(verdict) < LONG


def test_what_does_not_fit_in_memory_is_noted_and_not_in_the_domain(caplog):
    def build(node):
        plain = swiglu(node)

        def forward(gate, up):
            if is_long(gate):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return plain(gate, up)

        return forward

    given = made(build)
    verdict, candidate = judged(given)
    assert verdict.passed, verdict.reason
    (note,) = [n for n in verdict.notes if n.startswith("prefill")]
    assert note.startswith("prefill-8x2048: not judged, a call of ")
    assert note.endswith(" is too large; the reference runs there")
    assert longest(verdict) < LONG
    limit(candidate, given, verdict.domain)
    assert ran(candidate, given, TARGETS[1], caplog)[1] > 0  # and nothing was raised


def test_memory_that_pytorch_keeps_unused_counts_as_free(monkeypatch):
    """What ran before must not decide which steps are judged."""
    kept = [10**12]
    monkeypatch.setattr("harness.domains.give_back", lambda _: kept.clear())
    monkeypatch.setattr("harness.domains.free_bytes", lambda _: 10**12 - sum(kept))
    verdict, _ = judged(made(swiglu))
    assert verdict.passed and kept == []
    assert not any("do not fit" in note for note in verdict.notes)
    monkeypatch.setattr("harness.domains.give_back", lambda _: kept.append(10**12))
    verdict, _ = judged(made(swiglu))
    assert [n for n in verdict.notes if "its caches do not fit beside the weights" in n]


def in_blocks(node: Any) -> Callable[..., Any]:
    """An honest attention: a running softmax, its exponentials rounded to BF16 for the product."""

    def forward(q, k, v, mask):
        share, every = q.shape[2] // k.shape[2], torch.arange(k.shape[1])
        mask = (every <= every[-q.shape[1] :, None])[None] if mask is None else mask
        q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) * node.scale).masked_fill(~mask[:, None], LOWEST)
        top, weight, mixed = scores[..., :1] * 0 + LOWEST, 0.0, torch.zeros_like(q)
        for x, y in zip(scores.split(16, -1), v.split(16, 2), strict=True):
            higher = torch.maximum(top, x.amax(-1, keepdim=True))
            kept, p = (top - higher).exp(), (x - higher).exp()
            weight = weight * kept + p.sum(-1, keepdim=True)
            mixed, top = mixed * kept + p.bfloat16().float() @ y, higher
        return (mixed / weight).bfloat16().transpose(1, 2)

    return forward


def test_a_timed_step_has_noise_of_its_own(monkeypatch):
    """Of 32 keys a rounding of probabilities changes more results than of a few."""
    work = Workload.load("beam", "mini", "cpu")
    adds = {"attention_probabilities_bf16": "tensor cores"}
    given = change("attend", in_blocks, Contract(numerics="reduction", adds=adds))

    def last() -> tuple[float, float, tuple[str, ...]]:
        verdict = judge_with_domain(
            work.model, changed(work, given), given, "torch", work, 1, targets=TARGETS[1:]
        )
        assert verdict.passed, verdict.reason
        report = verdict.outputs[-1]
        assert report.output == "prefill-8x2048: out"
        return report.noise_share, 1 - report.bit_equal_share, verdict.notes

    noise, differing, notes = last()
    assert differing < noise < 1.15 * differing
    assert not any("within the noise" in note for note in notes)

    measure = Examination.measure_noise

    def too_large(self: Examination, node: Any, prepared: Prepared, *rest: Any) -> None:
        measure(self, node, prepared, *rest)
        if prepared.case.name == TARGETS[1]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Examination, "measure_noise", too_large)
    noise, same, notes = last()
    assert same == differing and noise < 0.95 * differing
    told = [note for note in notes if "within the noise of smaller calls" in note]
    assert len(told) == 2  # of a window and of a full cache
    assert all(note.endswith(".self_attn.attend is too large to replay") for note in told)


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_copies_for_the_candidate_lie_as_the_originals_do(offset):
    room = torch.arange(64, dtype=torch.bfloat16)
    flat = room[offset : offset + 24]
    for tensor in (
        flat,
        flat.view(4, 6)[:, :4],
        flat.view(4, 6).t(),
        flat[:6].expand(3, 6),
        flat.view(2, 12)[:, None, ::2].expand(2, 3, 6),
    ):
        copy = clone(tensor)
        assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()
        assert copy.data_ptr() % 16 == tensor.data_ptr() % 16 == offset * 2 % 16
        assert copy.untyped_storage().data_ptr() != room.untyped_storage().data_ptr()
        shape = tuple(tensor.shape)
        assert layout(shape, copy.stride()) == layout(shape, tensor.stride())
