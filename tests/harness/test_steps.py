"""The steps that verdicts run on: those that the targets' sizes ask for, where they fit."""

import itertools

import pytest

from harness import steps as module
from harness.steps import BATCHES, steps
from harness.trees import leaves
from harness.workload import TARGETS
from tests.harness.judged import toy


def labels(count: int, notes: list[str]) -> dict[str, int]:
    """The batch of each of the first steps."""
    made = itertools.islice(steps(toy(), 0, note=notes.append), count)
    return {label: len(inputs.ids) for label, inputs in made}


def test_every_target_s_batch_is_judged_where_the_model_is_no_toy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decodes = {t.batch for t in TARGETS.values() if t.kind == "decode"}
    assert decodes == {1, *BATCHES}
    assert not any("sequences" in label for label in labels(6, []))
    monkeypatch.setattr("harness.workload.TOY_PARAMETERS", 0)
    notes: list[str] = []
    found = labels(8, notes)
    many = {batch for label, batch in found.items() if label == f"decode of {batch} sequences"}
    assert many == set(BATCHES) and notes == []


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.workload.TOY_PARAMETERS", 0)
    room = 2 * module.prompt_length(()) + 2
    cache = toy().file.cache(toy().config, 1, room, "meta")
    each = sum(t.nbytes for _, t in leaves(cache))
    monkeypatch.setattr("harness.steps.free_bytes", lambda _: 2 * BATCHES[-2] * each)
    notes: list[str] = []
    found = labels(8, notes)
    assert f"decode of {BATCHES[-2]} sequences" in found
    assert f"decode of {BATCHES[-1]} sequences" not in found
    assert notes == [f"decode of {BATCHES[-1]} sequences is not judged: its caches do not fit"]


def test_memory_that_pytorch_keeps_unused_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.workload.TOY_PARAMETERS", 0)
    kept = [10**12]
    monkeypatch.setattr("harness.steps.give_back", lambda _: kept.clear())
    monkeypatch.setattr("harness.steps.free_bytes", lambda _: 10**12 - sum(kept))
    notes: list[str] = []
    labels(8, notes)
    assert notes == [] and kept == []


def test_some_position_of_a_toy_is_not_exact_in_bf16() -> None:
    made = dict(itertools.islice(steps(toy(), 0), 6))
    positions = made["decode of one sequence"].positions
    apart = (positions - positions.bfloat16().long()).abs()
    assert int(apart.max()) >= 2  # as far as FP32 logarithms and angles show it
