"""The whole model, layer by layer, each fed the reference's own inputs.

Random-weight models with routing are chaotic: a free-running comparison at the end is nearly blind.
So the reference runs, and at each layer the candidate's layer gets a copy of the same arguments;
results and cache writes are judged against the reference's, within that kind of layer's self-noise.
Only one layer's copies exist at a time.

A few steps are judged in full: noise, repeated calls on poisoned memory. Of the many decode steps
that may follow, teacher-forced by the reference's own run, a layer call costs one call of the
candidate; noise is measured at some of them for each layer and pooled by kind of layer, and a call
that shows anything but rounding is judged in full.
"""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness import verdicts
from harness.added import ADDED
from harness.cases import Case, copied, storages
from harness.drift import DECODES as DRIFT_DECODES
from harness.drift import describe, drift
from harness.examine import Examination
from harness.forced import regular
from harness.nodes import kind
from harness.observe import CandidateError, observe, watching_integers
from harness.policy import IN, Policy
from harness.records import Verdict
from harness.routes import Deviations, routing
from harness.spent import spent
from harness.steps import decode_label, steps
from harness.trees import map_tensors
from harness.workload import StepInputs, Workload
from optimized.change import Contract

FEWEST_RUNS = 2  # noise replays of one layer call
STEPS_PER_MODEL = 5  # prefills and decodes that harness.steps yields for its small sizes
DECODES = 32  # teacher-forced decode steps of a full verdict
NOISY_CALLS = 8  # of them, the fewest of a kind of layer at which noise is measured


def layer_names(model: nn.Module) -> list[str]:
    """The elements of the outermost module lists, in order; the model's children if it has none."""
    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    outer = [n for n in lists if not any(n.startswith(f"{o}.") for o in lists if o != n)]
    found = [f"{n}.{i}" for n in outer for i, _ in model.get_submodule(n).named_children()]
    return found or [name for name, _ in model.named_children()]


@spent("model")
def judge_model(
    reference: nn.Module,
    candidate: nn.Module,
    workload: Workload,
    seed: int,
    *,
    per_kind: int | None = None,
    full: bool = False,
    drifts: bool = True,
    policy: Policy | None = None,
) -> Verdict:
    """Judge the layers of `candidate`, which shares parameters with `reference`.

    Roundings that the contracts of its applied changes declare to add count as noise. With
    `per_kind`, only so many layers of each kind, drawn from `seed`, are judged; the notes say so.
    A `full` verdict follows the prefill with DECODES teacher-forced decode steps, and its drift
    covers decode steps and forced routes; `drifts` leaves the drift out where False.
    """
    contract, policy = joint_contract(candidate), policy or workload.policy
    exam = Examination(contract, storages(reference, candidate), seed)
    exam.golden = False  # a whole layer's distance from FP64 says nothing about one change
    exam.faults.add("policy", policy.refusal(contract))
    if exam.faults.reason is not None:
        return verdicts.verdict(exam, "model", [])
    names = layer_names(reference)
    if per_kind is not None:
        chosen = draw(reference, names, per_kind, seed)
        exam.notes.append(f"judged {len(chosen)} of {len(names)} layers: {', '.join(chosen)}")
        names = chosen
    decodes = DECODES if full else 1
    judge = _Layers(exam, reference, candidate, names, policy.permutations, decodes)
    for label, inputs in steps(workload, seed, sizes=False, decodes=decodes):
        judge.run(label, inputs)
        if exam.faults.reason is not None:
            break
    if judge.unreached:
        exam.notes.append(f"never called: {', '.join(sorted(judge.unreached))}")
    if full and exam.faults.reason is None:
        exam.notes.append(
            f"one prefill and {decodes} teacher-forced decodes after it; noise was measured in "
            f"{judge.noisy} of {judge.light + judge.noisy} layer calls of the last {decodes - 1}"
        )
    made = None
    if drifts and exam.faults.reason is None:
        try:
            made = spent("model: drift")(drift)(
                reference,
                candidate,
                names=layer_names(reference),
                inputs=steps(workload, seed, sizes=False, decodes=DRIFT_DECODES),
                decodes=DRIFT_DECODES if full else 0,
                seed=seed,
                forced=full,
            )
            exam.notes += describe(made)
        except torch.OutOfMemoryError:
            exam.notes.append("the drift was not measured: it does not fit into memory")
    found = routing(list(judge.deviations.values()))
    return verdicts.verdict(exam, "model", [], routing=found, drift=made)


def draw(model: nn.Module, names: list[str], per_kind: int, seed: int) -> list[str]:
    """At most `per_kind` layers of each kind, in the model's order."""
    by_kind: dict[object, list[str]] = {}
    for name in names:
        by_kind.setdefault(kind(model.get_submodule(name)), []).append(name)
    chooser = random.Random(seed)
    drawn = {
        name
        for members in by_kind.values()
        for name in chooser.sample(members, min(per_kind, len(members)))
    }
    return [name for name in names if name in drawn]


def joint_contract(candidate: nn.Module) -> Contract:
    """What all changes applied in layers of `candidate` declare together, by the names that their
    rounding points have in a layer's own replay."""
    elides: dict[str, str] = {}
    adds: dict[str, str] = {}
    for layer in layer_names(candidate):
        for name, node in candidate.get_submodule(layer).named_modules():
            contract = getattr(node, "contract", None)
            if isinstance(contract, Contract):
                inner = {n for n, _ in node.named_modules()}
                elides |= {_seen_from_above(p, name, inner): w for p, w in contract.elides.items()}
                adds |= {_seen_from_above(p, name, inner): w for p, w in contract.adds.items()}
    return Contract(numerics="reduction", elides=elides, adds=adds)


def _seen_from_above(point: str, node: str, inner: set[str]) -> str:
    """The name, above `node`, of one of its rounding points or their uses; `inner` are the names of
    its modules."""
    if not node or point in ADDED:
        return point
    made, _, reader = point.rpartition(IN)
    if made and reader in inner:
        return f"{_seen_from_above(made, node, inner)}{IN}{node}.{reader}"
    module, _, _ = point.partition(": ")
    return f"{node}.{point}" if module in inner else f"{node}: {point}"


class _Layers:
    """Judges layers while the reference runs."""

    def __init__(
        self,
        exam: Examination,
        reference: nn.Module,
        candidate: nn.Module,
        names: list[str],
        permutations: int,
        decodes: int,
    ) -> None:
        self.exam, self.reference, self.candidate, self.names = exam, reference, candidate, names
        self.unreached = set(names)
        self.kinds: dict[object, list[str]] = {}
        for name in names:
            self.kinds.setdefault(kind(reference.get_submodule(name)), []).append(name)
        self.kind_of = {n: members[0] for members in self.kinds.values() for n in members}
        calls = {m[0]: len(m) * STEPS_PER_MODEL for m in self.kinds.values()}
        self.runs = {n: max(FEWEST_RUNS, -(-permutations // c)) for n, c in calls.items()}
        self.deviations = {n: Deviations() for n in calls}
        self.later = [decode_label(n) for n in range(1, decodes)]  # judged lightly
        self.noisy_runs: dict[str, int] = {}
        self.measured = self._schedule(permutations)  # noise, by layer: in which of the later steps
        self.light = self.noisy = 0  # layer calls
        self.waiting: dict[str, Case] = {}
        self.integers: dict[str, dict[str, list[Tensor]]] = {}
        self.loose: set[str] = set()  # kinds of layers whose decodes write in conflict
        self.busy = False

    def _schedule(self, permutations: int) -> dict[str, set[str]]:
        """Each layer gets its own of the later steps, spread over all of them."""
        found: dict[str, set[str]] = {}
        if not self.later:
            return found
        for members in self.kinds.values():
            each = min(len(self.later), -(-NOISY_CALLS // len(members)))
            calls = each * len(members)
            self.noisy_runs[members[0]] = max(FEWEST_RUNS, -(-permutations // calls))
            for i, name in enumerate(members):
                at = (i + len(members) * n for n in range(each))
                found[name] = {self.later[a * len(self.later) // calls] for a in at}
        return found

    def run(self, label: str, inputs: StepInputs) -> None:
        """One step of the reference, all layers judged on the way."""
        later = label in self.later
        with contextlib.ExitStack() as stack, torch.no_grad():
            for name in self.names:
                layer = self.reference.get_submodule(name)
                if later:
                    self.integers[name] = stack.enter_context(watching_integers(layer))
                before = layer.register_forward_pre_hook(
                    self._before(name, label), with_kwargs=True
                )
                after = layer.register_forward_hook(self._after(name, later), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            self.reference(*inputs.args)

    def _before(self, name: str, label: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.busy and self.exam.faults.reason is None:
                fixed = self.exam.fixed
                args, kwargs = map_tensors(lambda t: copied(t, fixed), (args, kwargs))
                case = Case(name=label, node=name, args=args, kwargs=kwargs)
                self.waiting[name] = case

        return hook

    def _after(self, name: str, later: bool) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            case = self.waiting.pop(name, None)
            if case is None or self.busy:
                return
            self.unreached.discard(name)
            self.busy = True  # the judge calls the layer again
            try:
                if later:
                    self._judge_lightly(name, case, (args, kwargs, result))
                else:
                    member = self.kind_of[name]
                    self._judge(name, case, f"{member}: ", self.runs[member])
            finally:
                self.busy = False

        return hook

    def _judge(self, name: str, case: Case, prefix: str, runs: int) -> None:
        """One layer call in full, with `runs` noise replays."""
        exam, deviations = self.exam, self.deviations[self.kind_of[name]]
        exam.prefix, deviations.where = prefix, f"{name}, {case.name}"
        ours, mine = self.reference.get_submodule(name), self.candidate.get_submodule(name)
        prepared = exam.prepare(ours, case, as_is=True)
        if case.name in (decode_label(0), *self.later):
            if any(bool(t.any()) for t in prepared.first.unspecified.values()):
                self.loose.add(self.kind_of[name])
        exam.measure_noise(ours, prepared, runs, deviations)
        exam.judge(ours, mine, prepared, deviations)

    def _judge_lightly(self, name: str, case: Case, done: tuple[Any, Any, Any]) -> None:
        """One layer call of many: the candidate's against what the reference has just done."""
        exam, member = self.exam, self.kind_of[name]
        prefix = f"{member}, later decodes: "
        if case.name in self.measured[name]:
            self.noisy += 1
            return self._judge(name, case, prefix, self.noisy_runs[member])
        self.light += 1
        ours, mine = self.reference.get_submodule(name), self.candidate.get_submodule(name)
        compared = None
        if member in self.loose:  # which elements count is known by a replay
            return self._judge(name, case, prefix, 0)
        with contextlib.suppress(CandidateError):  # the full judgement says which
            seen = observe(mine, ours, case, exam.fixed)
            compared = regular(ours, case, done, self.integers[name], seen, exam.fixed)
        if compared is None:
            return self._judge(name, case, prefix, 0)
        exam.prefix = prefix
        for output, theirs, reference, mask in compared.tensors:
            exam.tally(output).add(f"{name}, {case.name}", theirs, reference, mask)
        self.deviations[member].rows += compared.rows
        exam.cases += 1
