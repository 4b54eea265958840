"""The whole model, layer by layer, each fed the reference's own inputs.

Random-weight models with routing are chaotic: a free-running comparison at the end is nearly blind.
So the reference runs, and at each layer the candidate's layer gets a copy of the same arguments;
results and cache writes are judged against the reference's, within that kind of layer's self-noise.
Only one layer's copies exist at a time.
"""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness import verdicts
from harness.cases import Case, copied, storages
from harness.examine import Examination
from harness.nodes import kind
from harness.policy import DEFAULT, Policy
from harness.records import Verdict
from harness.replay import Noise, Plan, replay
from harness.routes import Deviations
from harness.steps import steps
from harness.trees import map_tensors
from harness.workload import StepInputs, Workload
from optimized.change import Contract

FEWEST_RUNS = 2  # noise replays of one layer call
STEPS_PER_MODEL = 5  # prefills and decodes that harness.steps yields for its small sizes


def layer_names(model: nn.Module) -> list[str]:
    """The elements of the outermost module lists, in order; the model's children if it has none."""
    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    outer = [n for n in lists if not any(n.startswith(f"{o}.") for o in lists if o != n)]
    found = [f"{n}.{i}" for n in outer for i, _ in model.get_submodule(n).named_children()]
    return found or [name for name, _ in model.named_children()]


def judge_model(
    reference: nn.Module,
    candidate: nn.Module,
    workload: Workload,
    seed: int,
    *,
    per_kind: int | None = None,
    policy: Policy = DEFAULT,
) -> Verdict:
    """Judge the layers of `candidate`, which shares parameters with `reference`.

    Roundings that the contracts of its applied changes declare to add count as noise. With
    `per_kind`, only so many layers of each kind, drawn from `seed`, are judged; the notes say so.
    """
    contract = joint_contract(candidate)
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
    judge = _Layers(exam, reference, candidate, names, policy.permutations)
    first: StepInputs | None = None
    for label, inputs in steps(workload, seed, sizes=False):
        if first is None:
            first = map_tensors(torch.clone, inputs)
        judge.run(label, inputs)
        if exam.faults.reason is not None:
            break
    if judge.unreached:
        exam.notes.append(f"never called: {', '.join(sorted(judge.unreached))}")
    if first is not None and exam.faults.reason is None:
        exam.notes.append(drift(reference, candidate, first, seed))
    return verdicts.verdict(exam, "model", [])


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
    """What all changes applied to `candidate` declare together."""
    elides: dict[str, str] = {}
    adds: dict[str, str] = {}
    for module in candidate.modules():
        contract = getattr(module, "contract", None)
        if isinstance(contract, Contract):
            elides.update(contract.elides)
            adds.update(contract.adds)
    return Contract(numerics="reduction", elides=elides, adds=adds)


class _Layers:
    """Judges layers while the reference runs."""

    def __init__(
        self,
        exam: Examination,
        reference: nn.Module,
        candidate: nn.Module,
        names: list[str],
        permutations: int,
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
        self.waiting: dict[str, Case] = {}
        self.busy = False

    def run(self, label: str, inputs: StepInputs) -> None:
        """One step of the reference, all layers judged on the way."""
        with contextlib.ExitStack() as stack, torch.no_grad():
            for name in self.names:
                layer = self.reference.get_submodule(name)
                before = layer.register_forward_pre_hook(
                    self._before(name, label), with_kwargs=True
                )
                after = layer.register_forward_hook(self._after(name))
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

    def _after(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            case = self.waiting.pop(name, None)
            if case is None or self.busy:
                return
            self.unreached.discard(name)
            self.busy = True  # the judge calls the layer again
            try:
                self._judge(name, case)
            finally:
                self.busy = False

        return hook

    def _judge(self, name: str, case: Case) -> None:
        exam, member = self.exam, self.kind_of[name]
        exam.prefix = f"{member}: "
        ours, mine = self.reference.get_submodule(name), self.candidate.get_submodule(name)
        prepared = exam.prepare(ours, case, as_is=True)
        deviations = self.deviations[member]
        exam.measure_noise(ours, prepared, self.runs[member], deviations)
        exam.judge(ours, mine, prepared, deviations)


def drift(reference: nn.Module, candidate: nn.Module, inputs: StepInputs, seed: int) -> str:
    """How far the candidate's free-running result is from the reference's, beside how far the
    reference's own is under permuted reductions: a finding, not a gate."""
    with torch.no_grad():
        ours = _logits(reference(*map_tensors(torch.clone, inputs).args))
        theirs = _logits(candidate(*map_tensors(torch.clone, inputs).args))
        noisy = replay(reference, inputs.args, Plan(noise=Noise(seed=seed)))
    own = _logits(next(iter(noisy.outputs.values())))
    return (
        f"free-running prefill: {_distance(theirs, ours)}; "
        f"the reference against itself under noise: {_distance(own, ours)}"
    )


def _logits(result: Any) -> Tensor:
    while not isinstance(result, Tensor):
        result = result[0]
    return result.double()


def _distance(a: Tensor, b: Tensor) -> str:
    difference = float((a - b).norm() / b.norm())
    p, q = torch.log_softmax(a, -1), torch.log_softmax(b, -1)
    divergence = float((q.exp() * (q - p)).sum(-1).mean())
    flips = int((a.argmax(-1) != b.argmax(-1)).sum())
    return f"relative {difference:.2g}, KL {divergence:.2g}, {flips} top-1 flip(s)"
