"""Executables that are not the module they were made from: each is caught, and named."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.audit import AFTER, AMONG, EAGER, RECAPTURED, SPREAD, Auditor, audit, drawn
from harness.bench import compare
from harness.conflicts import Conflicts
from harness.records import Audit, AuditedCall
from harness.step import Step
from harness.trees import map_tensors
from harness.weights import Weights
from harness.workload import tensors_in
from tests.harness.judged import mini, toy

WIDTH, SLOTS = 8, 16


class Model(nn.Module):
    """Attends over a cache that it writes; `count` tells how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=seeded(0)))
        self.weight.requires_grad_(False)
        self.count = 0

    def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        self.count += 1
        h = x @ self.weight
        cache[at] = h
        return (h @ cache.T).softmax(-1) @ cache


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fresh(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = seeded(seed)
    x = torch.randn(2, WIDTH, generator=generator)
    at = torch.randperm(SLOTS, generator=generator)[:2]
    return x, at, torch.randn(SLOTS, WIDTH, generator=generator)


def audited(model: Callable[..., Any], step: Step | None = None, seed: int = 7) -> AuditedCall:
    step = step or Step(model, fresh(1), "eager")
    return audit(step, model, fresh, name="decode", seed=seed)


def refusal(model: Callable[..., Any], step: Step | None = None) -> str:
    found = audited(model, step)
    assert found.reason is not None
    return found.reason


def test_an_honest_step_passes_and_its_tensors_are_as_before() -> None:
    model = Model()
    step = Step(model, fresh(1), "eager")
    before = [tensor.clone() for tensor in step.args]
    found = audited(model, step)
    assert (found.reason, found.compared_with, found.seed) == (None, EAGER, 7)
    assert (found.step, found.when) == ("decode", AFTER)
    assert all(torch.equal(a, b) for a, b in zip(before, step.args, strict=True))
    assert model.count == 3  # built, run on the drawn inputs, and the module


def test_seeds_come_from_the_system() -> None:
    model = Model()
    step = Step(model, fresh(1), "eager")
    seeds = {audit(step, model, fresh).seed for _ in range(8)}
    assert len(seeds) == 8


class Stale(Step):
    """A step that gives what its first run gave, as a graph of other tensors would."""

    def __call__(self) -> Any:
        if not hasattr(self, "first"):
            self.first = self.output.clone()
        self.output = self.first.clone()
        return self.output


def test_a_stale_executable_is_named() -> None:
    model = Model()
    step = Stale(model, fresh(1), "eager")
    step()
    assert refusal(model, step) == (
        "out is what an earlier call gave, not the result of these inputs: a stale graph, or a "
        "memoised result"
    )


class Remembers(Model):
    """Keeps its results by the address of its first argument."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies, self.known = copies, {}

    def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        key = x.data_ptr()
        if key not in self.known:
            self.known[key] = x, super().forward(x, at, cache)
        result = self.known[key][1]
        return result.clone() if self.copies else result


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "the-same-tensor"])
def test_a_result_memoised_by_address_is_named(copies: bool) -> None:
    assert "memoised" in refusal(Remembers(copies))


class Late(Step):
    """Gives the result before the last: what a pipeline that is not drained leaves."""

    def __call__(self) -> Any:
        late = self.output
        super().__call__()
        self.output, self.kept = late.clone(), self.output
        return self.output


def test_results_that_come_one_call_late_are_caught() -> None:
    model = Model()
    reason = refusal(model, Late(model, fresh(1), "eager"))
    assert "out" in reason


class Partly(Step):
    """Writes half of a buffer that it returns every time."""

    def __call__(self) -> Any:
        buffer = self.output
        super().__call__()
        buffer[:1] = self.output[:1]
        self.output = buffer
        return buffer


def test_what_is_not_written_is_counted() -> None:
    model = Model()
    step = Partly(model, fresh(1), "eager")
    assert refusal(model, step).startswith("out is the very tensor that an earlier call returned")

    class Copied(Partly):
        def __call__(self) -> Any:
            self.output = self.output.clone()
            return super().__call__()

    step = Copied(model, fresh(1), "eager")
    assert refusal(model, step) == f"out: {WIDTH} of {2 * WIDTH} elements were not written"


class Knows(Model):
    """Does something else on tensors that it has met in a step: those of seed 1."""

    def __init__(self, otherwise: str) -> None:
        super().__init__()
        self.otherwise, self.timed = otherwise, None

    def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        if self.timed is None:
            self.timed = x.data_ptr()
        if x.data_ptr() != self.timed:
            return super().forward(x, at, cache)
        if self.otherwise == "no cache":
            return super().forward(x, at, cache.clone())
        if self.otherwise == "elsewhere":
            return super().forward(x, (at + 1) % SLOTS, cache)
        if self.otherwise == "other values":
            result = super().forward(x, at, cache)
            cache[at] *= 2
            return result
        x, at = (fresh(1)[i] for i in (0, 1))  # "only the timed inputs": the answer of those
        return super().forward(x, at, cache) + 0


@pytest.mark.parametrize(
    ("otherwise", "named"),
    [
        ("no cache", r"cache was not written in 2 row\(s\), the first at \(\d+,\), as the model"),
        ("elsewhere", r"out|cache was"),
        ("other values", r"cache holds other values in 2 row\(s\)"),
        ("only the timed inputs", r"is what an earlier call gave"),
    ],
)
def test_what_is_skipped_on_the_timed_tensors_is_named(otherwise: str, named: str) -> None:
    assert re.search(named, refusal(Knows(otherwise)))


def test_what_the_module_leaves_out_too_is_seen_beside_a_trusted_one() -> None:
    class Careless(Model):
        def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
            return super().forward(x, at, cache.clone())

    model = Careless()
    step = Step(model, fresh(1), "eager")
    assert audit(step, model, fresh).reason is None
    found = audit(step, model, fresh, trusted=Model())
    assert found.reason is not None and "cache was not written in 2 row(s)" in found.reason


class Evicts(Model):
    """Stores two rows in one spare slot; `last` of them stays there."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        result = super().forward(x, at, cache)
        cache[torch.full((2,), SLOTS - 1)] = torch.stack((x[1 - self.last], x[self.last]))
        return result


class OtherRow(Step):
    def __call__(self) -> Any:
        self.model.last = 1
        super().__call__()
        self.model.last = 0
        return self.output


def test_rows_that_are_stored_twice_may_hold_either_value() -> None:
    model = Evicts(0)
    step = OtherRow(model, fresh(1), "eager")
    reason = refusal(model, step)
    assert reason.startswith("cache holds other values in 1 row(s), the first at (15,)")
    for when in (AMONG, AFTER):
        auditor = Auditor(step, model, fresh, when=when, trusted=Evicts(0))
        auditor.call()
        assert auditor.check().reason is None

    class Wrong(OtherRow):
        def __call__(self) -> Any:
            super().__call__()
            self.args[2][self.args[1][0]] *= 2
            return self.output

    found = audit(Wrong(model, fresh(1), "eager"), model, fresh, trusted=Evicts(0), seed=7)
    assert found.reason is not None and "cache holds other values in 1 row(s)" in found.reason


@pytest.mark.parametrize("write", ["put", "copy", "scatter", "mask", "once"])
def test_conflicting_writes_are_seen_through_views(write: str) -> None:
    store = torch.zeros(2, 6, 3)
    whole, view = store.view(12, 3), store[1]
    at = torch.tensor([4, 4, 2])
    with Conflicts({"whole": whole, "other": torch.zeros(3)}) as found:
        if write == "put":
            view[at] = torch.ones(3, 3)
        elif write == "copy":
            view.index_copy_(0, at, torch.ones(3, 3))
        elif write == "scatter":
            view.scatter_(0, at[:, None].expand(3, 3), torch.ones(3, 3))
        elif write == "mask":
            view[torch.arange(6) > 3] = 1.0
        else:
            view[at.unique()] = 1.0
    marked = [] if write in ("mask", "once") else [10]
    assert [i for r in found.rows.values() for i in r.nonzero().flatten().tolist()] == marked


def test_a_module_that_does_not_repeat_itself_is_compared_with_its_own_spread() -> None:
    class Shaky(Model):
        def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
            return super().forward(x, at, cache) + (self.count % 2) * 2.0**-20

    model = Shaky()
    assert model.count == 0
    found = audited(model)
    assert (found.reason, found.compared_with) in ((None, SPREAD), (None, EAGER))
    model = Shaky()
    step = Step(model, fresh(1), "eager")
    step()  # now the audited run and the module's first differ
    found = audited(model, step)
    assert found.reason is None or "out" in found.reason

    class Far(Step):
        def __call__(self) -> Any:
            super().__call__()
            self.output = self.output + 1
            return self.output

    reason = refusal(model, Far(model, fresh(1), "eager"))
    assert reason.endswith("further than its own runs are apart")


def test_inputs_that_do_not_fit_or_do_not_repeat_are_our_error() -> None:
    model = Model()
    step = Step(model, fresh(1), "eager")
    with pytest.raises(ValueError, match="do not fit the step at x"):
        audit(step, model, lambda seed: (torch.zeros(3, WIDTH), *fresh(seed)[1:]))
    with pytest.raises(ValueError, match="makes other values each time"):
        audit(step, model, lambda seed: (torch.rand(2, WIDTH), *fresh(seed)[1:]))


def test_an_argument_that_is_given_twice_is_exchanged_once() -> None:
    def add(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def twice(seed: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(3, generator=seeded(seed))
        return x, x

    step = Step(add, twice(1), "eager")
    before = step.args[0].clone()
    assert audit(step, add, twice).reason is None
    assert torch.equal(step.args[0], before)


@pytest.mark.parametrize("name", ["decode-bs1", "prefill-8x2048"])
@pytest.mark.parametrize("workload", [mini, toy], ids=["mini", "toy"])
def test_whole_models_pass_on_drawn_inputs(workload: Any, name: str) -> None:
    work = workload()
    target = work.target(name)
    inputs = work.inputs(target)
    step = Step(work.model, inputs, "eager")
    before = [t.clone() for t in tensors_in(inputs)]
    found = audit(step, work.model, lambda seed: drawn(work, target, seed))
    assert (found.reason, found.compared_with) == (None, EAGER)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_in(inputs), strict=True))


def test_drawn_inputs_differ_in_all_but_a_prefills_positions() -> None:
    for name in ("decode-bs8", "prefill-8x2048"):
        target = mini().target(name)
        a, b, again = (drawn(mini(), target, seed) for seed in (1, 2, 1))
        assert not torch.equal(a.ids, b.ids)
        assert torch.equal(a.positions, b.positions) == (target.kind == "prefill")
        assert a.positions.max() < target.context and a.positions.min() >= 0
        same = [torch.equal(x, y) for x, y in zip(tensors_in(a), tensors_in(again), strict=True)]
        assert all(same)
        assert not torch.equal(a.cache.layers[0].k, b.cache.layers[0].k)


class Doubled(Step):
    """What a graph gives where a library picks another kernel for it."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, fresh(1), "eager")
        self.mode = "graph"

    def __call__(self) -> Any:
        self._eager()
        self.output = self.output * 2
        return self.output


class Recaptured(Auditor):
    """An auditor whose second graph multiplies the module's result by `factor`."""

    factor = 2.0

    def _recaptured(self) -> Any:
        again = self._eager(self.model)
        return replace(again, outputs={n: t * self.factor for n, t in again.outputs.items()})


@pytest.mark.parametrize(
    ("factor", "unchanged_passes", "reason", "compared_with"),
    [
        (2.0, False, None, RECAPTURED),
        (2.0, True, "a second graph gives the same: captured, it computes otherwise", EAGER),
        (1.0, True, "a second graph gives what the module gives", EAGER),
        (3.0, False, "a second graph differs from both", EAGER),
    ],
)
def test_other_bits_in_a_graph_are_excused_only_where_the_unchanged_model_has_them_too(
    factor: float, unchanged_passes: bool, reason: str | None, compared_with: str
) -> None:
    model = Model()
    auditor = Recaptured(Doubled(model), model, fresh, control=lambda: unchanged_passes)
    auditor.factor = factor
    auditor.call()
    found = auditor.check()
    assert found.compared_with == compared_with
    if reason is None:
        assert found.reason is None
    else:
        assert found.reason is not None and found.reason.endswith(reason)
        assert found.reason.startswith("16 of 16 elements of out are not what the module gives")


class TestAmongTimedCalls:
    @staticmethod
    def found(model: Model, base: Model | None = None) -> tuple[AuditedCall, Any]:
        inputs = fresh(1)
        base_step = Step(base or Model(), inputs, "eager")
        step = Step(model, inputs, "eager")
        auditor = Auditor(step, model, fresh, "decode", AMONG)
        pair = compare(base_step, step, 0.0, budget_s=0.05, min_pairs=8, auditor=auditor)
        return auditor.check(), pair

    def test_an_honest_candidate_passes_and_is_timed_as_before(self) -> None:
        found, pair = self.found(Model())
        assert (found.reason, found.when) == (None, AMONG)
        assert pair.pairs >= 8

    def test_the_call_is_one_of_many_at_a_drawn_place(self) -> None:
        places = set()
        for _ in range(6):
            model = Model()
            ids: list[tuple[int, float]] = []

            class Watched(Model):
                def forward(self, x: Tensor, at: Tensor, cache: Tensor, ids: Any = ids) -> Tensor:
                    ids.append((x.data_ptr(), float(x[0, 0])))
                    return super().forward(x, at, cache)

            model = Watched()
            found, _ = self.found(model)
            assert found.reason is None
            timed = float(fresh(1)[0][0, 0])
            address = ids[0][0]
            other = [i for i, (at, value) in enumerate(ids) if value != timed and at == address]
            assert len(other) == 1
            places.add(other[0])
        assert len(places) > 1

    def test_a_candidate_that_skips_work_while_it_is_timed_is_caught(self) -> None:
        """It sees what a timed call looks like, and the audit's call looks like that."""

        class Skips(Model):
            def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
                if self.count >= 2:  # built and warm: from now on it is being timed
                    return self.last.clone()
                self.last = super().forward(x, at, cache)
                return self.last

        found, pair = self.found(Skips())
        assert found.reason is not None and "earlier call" in found.reason
        assert pair.pairs >= 8


def test_an_audits_first_reason_is_the_attempts() -> None:
    good = audited(Model())
    bad = audited(Remembers(True))
    assert Audit(calls=(good,)).reason is None
    both = Audit(calls=(good, bad))
    assert both.reason == f"decode, after timing: {bad.reason}"
    assert Audit.from_json(both.to_json()) == both


def test_a_changed_weight_is_named() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3).bfloat16(), nn.BatchNorm1d(3))
    model.requires_grad_(False)
    weights = Weights(model)
    assert weights.changed(model) is None
    for name in ("0.weight", "0.bias", "1.weight", "1.bias", "2.running_mean"):
        tensor = dict(model.state_dict())[name].view(-1)
        before = tensor.clone()
        tensor[-1] += 1
        assert weights.changed(model) == name
        tensor.copy_(before)
        tensor[[0, -1]] = tensor[[-1, 0]]
        assert (weights.changed(model) == name) == (not torch.equal(tensor, before))
        tensor.copy_(before)
    assert weights.changed(model) is None
    model[1].bias = None
    assert weights.changed(model) == "1.bias"


def test_weights_may_move_but_not_change_their_values() -> None:
    model = nn.Linear(33, 129, bias=False).bfloat16().requires_grad_(False)
    weights = Weights(model)
    packed = torch.empty(130 * 33 + 1, dtype=torch.bfloat16)[1:].view(130, 33)
    packed[1:] = model.weight
    model.weight.data = packed[1:]
    assert weights.changed(model) is None
    model.weight.data = packed[1:].T.contiguous().T
    assert weights.changed(model) is None
    model.weight.data = packed[:-1]
    assert weights.changed(model) == "weight"


@pytest.mark.gpu
class TestGpu:
    """The same of a captured graph."""

    @staticmethod
    def fresh(seed: int) -> tuple[Tensor, ...]:
        return map_tensors(lambda t: t.cuda(), fresh(seed))

    def step(self, model: nn.Module, inputs: tuple[Tensor, ...] | None = None) -> Step:
        return Step(model.cuda(), inputs or self.fresh(1), "graph")

    def test_an_honest_graph_passes(self) -> None:
        model = Model()
        step = self.step(model)
        found = audit(step, model, self.fresh)
        assert (found.reason, found.compared_with) == (None, EAGER)

    def test_a_graph_of_other_tensors_is_stale(self) -> None:
        model = Model()
        step = self.step(model)
        step.args = self.fresh(2)
        found = audit(step, model, self.fresh)
        assert found.reason is not None

    def test_a_graph_that_computes_otherwise_than_the_module_is_told(self) -> None:
        class Captured(Model):
            def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
                result = super().forward(x, at, cache)
                return result * 2 if torch.cuda.is_current_stream_capturing() else result

        model = Captured()
        found = audit(self.step(model), model, self.fresh, control=lambda: True)
        assert found.reason is not None and "captured, it computes otherwise" in found.reason

    @pytest.mark.parametrize(
        ("name", "mode"), [("decode-bs1", "graph"), ("prefill-8x2048", "eager")]
    )
    def test_whole_model(self, name: str, mode: Any) -> None:
        from harness.workload import Workload

        work = Workload.load("beam", "mini", "cuda")
        target = work.target(name)
        step = Step(work.model, work.inputs(target), mode)
        for _ in range(8):
            found = audit(
                step, work.model, lambda seed: drawn(work, target, seed), trusted=work.model
            )
            assert (found.reason, found.compared_with) == (None, EAGER)
