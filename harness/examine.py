"""Everything the judge measures about a candidate, node by node and case by case."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness import faults
from harness.added import ADDED
from harness.cases import Case
from harness.compare import Tally
from harness.faults import Faults
from harness.observe import CandidateError, Observed, observe, poisoned, watching_integers
from harness.operators import is_real
from harness.replay import GOLDEN, Noise, Plan, Point, Run, named_arguments, replay
from harness.routes import Deviations, find_flips, kept_rows
from harness.trees import same_bits
from optimized.change import Contract

NAMED = Plan(carry=None, name=True)


@dataclass
class Evidence:
    """For one rounding: what telling the contract's replay from the flipped one found."""

    point: Point
    declared: str
    visible: int = 0
    elements: int = 0
    equals_declared: int = 0  # of the visible elements
    equals_flipped: int = 0
    differs_flipped: int = 0  # of all elements
    noise: int = 0  # elements that noise changes where the rounding is not added


@dataclass
class Prepared:
    """One case with the reference's runs: as it is, and as the contract says."""

    case: Case
    first: Run
    contract: Run
    masks: dict[str, Tensor]  # elements of written arguments that count
    initial: dict[str, Tensor]


@dataclass
class Examination:
    """Pools what all cases of all nodes show about one candidate."""

    contract: Contract
    fixed: set[int]
    seed: int
    faults: Faults = field(default_factory=Faults)
    tallies: dict[str, Tally] = field(default_factory=dict)
    points: dict[str, Evidence] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cases: int = 0
    names: set[str] = field(default_factory=set)  # of all rounding points and intermediates
    flipped: int = 0
    noise_runs: int = 0
    golden: bool = True  # compare typical cases with FP64
    prefix: str = ""  # of the outputs' names: one tally for each kind of layer

    @property
    def unknown(self) -> list[str]:
        """Names in the contract that no judged case has."""
        names = {*self.contract.elides, *self.contract.adds} - ADDED.keys()
        return sorted(names - self.names) if self.cases else []

    def plan(self, **changes: Any) -> Plan:
        elide, add = frozenset(self.contract.elides), frozenset(self.contract.adds)
        return Plan(**{"elide": elide, "add": add, **changes})

    def numerics(self, output: str) -> str:
        declared = self.contract.numerics
        return declared if isinstance(declared, str) else declared.get(output, "exact")

    def tally(self, output: str) -> Tally:
        key = f"{self.prefix}{output}"
        if key not in self.tallies:
            self.tallies[key] = Tally(key, self.numerics(output))
        return self.tallies[key]

    def prepare(self, reference: nn.Module, case: Case, *, as_is: bool = False) -> Prepared:
        """Run the reference on the case; raises what the reference raises.

        The candidate is compared with the contract's replay or, with `as_is`, with the reference's
        own results.
        """
        with watching_integers(reference) as integers:
            first = replay(reference, case.args, NAMED, None, case.kwargs)
        first.integers = integers
        self.names.update(p.name for p in (*first.points, *first.wides))
        contract = first
        if not as_is:
            contract = replay(reference, case.args, self.plan(), first, case.kwargs)
        initial = named_arguments(reference, case.args, case.kwargs)
        masks = {}
        for name, final in contract.written.items():
            rows = faults.written_rows(initial[name], final)
            loose = first.unspecified.get(name)
            masks[name] = rows if loose is None else rows & ~loose
        return Prepared(case, first, contract, masks, initial)

    def measure_noise(
        self, reference: nn.Module, prepared: Prepared, runs: int, deviations: Deviations
    ) -> None:
        """Replay the case with perturbed reductions and transcendental functions."""
        classes = {self.numerics(name) for name in prepared.contract.results}
        if classes == {"exact"} and not prepared.first.choices:
            return
        for _ in range(runs):
            self.noise_runs += 1
            noise = Noise(
                seed=self.seed * 100_003 + self.noise_runs,
                reorder="reduction" in classes or bool(prepared.first.choices),
            )
            plan = self.plan(noise=noise)
            case = prepared.case
            perturbed = replay(reference, case.args, plan, prepared.first, case.kwargs)
            deviations.add(prepared.first, perturbed)
            for name, tensor in perturbed.results.items():
                if is_real(tensor.dtype) and self.numerics(name) != "exact":
                    tally, mask = self.tally(name), prepared.masks.get(name)
                    tally.add_noise(
                        self._where(case),
                        tensor,
                        prepared.contract.results[name],
                        mask,
                        typical=case.typical,
                    )

    def judge(
        self,
        reference: nn.Module,
        candidate: nn.Module,
        prepared: Prepared,
        deviations: Deviations,
    ) -> Observed | None:
        """Run the candidate on the case and compare all it did; None if that ended early."""
        case = prepared.case
        try:
            seen = observe(candidate, reference, case, self.fixed)
            problem = faults.arguments_and_shapes(prepared.first, seen, prepared.initial)
            if problem is not None:
                self.faults.add("call", f"{problem} ({self._where(case)})")
                return None
            self._repeat(reference, candidate, prepared, seen)
        except CandidateError as error:
            self.faults.add("call", f"raises {error} ({self._where(case)})")
            return None
        results = self._results(prepared, seen)
        keep = self._routes(prepared, seen, deviations)
        golden = None
        if case.typical and self.golden:
            golden = replay(reference, case.args, GOLDEN, prepared.first, case.kwargs).results
        for name, mine in results.items():
            ours = prepared.contract.results[name]
            where = f"{name} ({self._where(case)})"
            self.faults.add("finite", faults.non_finite(where, mine, ours))
            if name in prepared.masks:
                loose = prepared.first.unspecified.get(name)
                problem = faults.cache_writes(where, prepared.initial[name], ours, mine, loose)
                self.faults.add("writes", problem)
            rows = kept_rows(keep, ours)
            mask = prepared.masks.get(name)
            if rows is not None:
                mask = rows if mask is None else mask & rows
            if is_real(ours.dtype):
                self.tally(name).add(self._where(case), mine, ours, mask)
                if golden is not None and mask is None:
                    self.tally(name).add_golden(mine, ours, golden[name])
            elif keep is None and not same_bits(mine, ours):
                self.faults.add("route", f"{where}: integers differ from the reference's")
        self.cases += 1
        return seen

    def _where(self, case: Case) -> str:
        return f"{case.node}, {case.name}"

    def _results(self, prepared: Prepared, seen: Observed) -> dict[str, Tensor]:
        """The candidate's outputs and the arguments that the reference writes to."""
        written = {name: seen.arguments[name] for name in prepared.contract.written}
        return {**seen.results, **written}

    def _repeat(
        self, reference: nn.Module, candidate: nn.Module, prepared: Prepared, seen: Observed
    ) -> None:
        """Call again, on memory full of NaN: the same bits must come out, and no NaN."""
        before = self._results(prepared, seen)
        for fill in (False, True):
            with poisoned(seen.results, fill=fill):
                again = observe(candidate, reference, prepared.case, self.fixed)
            for name, tensor in self._results(prepared, again).items():
                if same_bits(before[name], tensor):
                    continue
                loose = prepared.first.unspecified.get(name)
                if loose is not None and same_bits(
                    before[name].masked_fill(loose, 0), tensor.masked_fill(loose, 0)
                ):
                    continue
                where = f"{name} ({self._where(prepared.case)})"
                kind, text = faults.repeat_differs(where, before[name], tensor)
                if kind == "unwritten" or not fill:  # in that mode other kernels may run
                    self.faults.add(kind, text)

    def _routes(self, prepared: Prepared, seen: Observed, deviations: Deviations) -> Tensor | None:
        """The rows that were routed differently for noise alone; None if there is none."""
        pairs = [
            (name, ours, seen.results[name])
            for name, ours in prepared.first.outputs.items()
            if not is_real(ours.dtype)
        ]
        pairs += faults.integer_pairs(prepared.first, seen)
        flips = find_flips(pairs, prepared.first.choices, deviations)
        self.flipped += flips.count
        if flips.unexplained is not None:
            self.faults.add("route", f"{flips.unexplained} ({self._where(prepared.case)})")
        return flips.rows

    def weigh_points(self, reference: nn.Module, prepared: Prepared, seen: Observed) -> int:
        """For each rounding: which of two replays does the candidate equal where they differ?
        Returns the number of roundings."""
        mine = self._results(prepared, seen)
        declared = [(p, "elided" if p.name in self.contract.elides else "kept")
                    for p in prepared.first.points if p.interior]  # fmt: skip
        declared += [(p, "kept") for p in prepared.first.fusable]
        declared += [(_added_point(name), "added") for name in self.contract.adds]
        for point, word in declared:
            evidence = self.points.setdefault(point.name, Evidence(point, word))
            plan = self.plan()
            if word == "added":
                plan = self.plan(add=plan.add - {point.name})
            elif point.fused:
                plan = self.plan(fuse=frozenset((point.name,)))
            else:
                plan = self.plan(elide=plan.elide ^ {point.name})
            case = prepared.case
            other = replay(reference, case.args, plan, prepared.first, case.kwargs).results
            if word == "added":
                evidence.noise += self._plain_noise(reference, prepared, plan, other)
            for name, ours in prepared.contract.results.items():
                if not is_real(ours.dtype) or not ours.numel():
                    continue
                visible = ours != other[name]
                equal = (mine[name] == ours) & visible
                flipped = (mine[name] == other[name]) & visible
                apart = mine[name] != other[name]
                sums = [visible.sum(), equal.sum(), flipped.sum(), apart.sum()]
                sums = torch.stack(sums).tolist()
                evidence.elements += ours.numel()
                evidence.visible += sums[0]
                evidence.equals_declared += sums[1]
                evidence.equals_flipped += sums[2]
                evidence.differs_flipped += sums[3]
        return len(declared)

    def _plain_noise(
        self, reference: nn.Module, prepared: Prepared, plan: Plan, plain: dict[str, Tensor]
    ) -> int:
        """How many elements noise changes in a replay without an added rounding."""
        self.noise_runs += 1
        noisy = replace(plan, noise=Noise(seed=self.seed * 100_003 + self.noise_runs))
        case = prepared.case
        results = replay(reference, case.args, noisy, prepared.first, case.kwargs).results
        return sum(int((t != plain[n]).sum()) for n, t in results.items() if is_real(t.dtype))


def _added_point(name: str) -> Point:
    return Point(
        name=name, operator="", module="", source="", shape=(), dtype="", index=-1, added=True
    )
