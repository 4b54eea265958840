"""Everything the judge measures about a candidate, node by node and case by case."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness import faults
from harness.added import ADDED
from harness.bounds import Path
from harness.cases import Case
from harness.compare import SelfNoise, Tally
from harness.faults import Faults
from harness.noise import kinds
from harness.observe import CandidateError, Observed, observe, poisoned, watching_integers
from harness.operators import is_real
from harness.policy import IN
from harness.replay import GOLDEN, Noise, Plan, Point, Run, named_arguments, replay
from harness.routes import Deviations, find_flips, kept_rows
from harness.trees import same_bits
from harness.weigh import Evidence, Flip, weigh
from optimized.change import Contract

DIGITS = re.compile(r"\d+")
NAMED = Plan(carry=None, name=True)


@dataclass
class Prepared:
    """One case with the reference's runs: as it is, and as the contract says. `golden` and `flips`
    are None where they are made anew for each candidate, to save memory."""

    case: Case
    first: Run
    contract: Run
    masks: dict[str, Tensor]  # elements of written arguments that count
    initial: dict[str, Tensor]
    golden: dict[str, Tensor] | None = None
    flips: list[Flip] | None = None
    moved: dict[str, Tensor] = field(default_factory=dict)  # how often noise changed each element
    draws: int = 0  # in so many replays

    @property
    def where(self) -> str:
        return f"{self.case.node}, {self.case.name}"

    @property
    def path(self) -> Path:
        """What rounded in the reference's run, however many tokens and whichever of several equal
        modules they met."""
        points = self.first.points
        return frozenset((DIGITS.sub("*", p.module), p.operator, p.source) for p in points)

    @property
    def device(self) -> torch.device:
        """Of the results, if there are any."""
        return next((t.device for t in self.contract.results.values()), torch.device("cpu"))


@dataclass
class Examination:
    """Pools what all cases of all nodes show about one candidate.

    `noise` and `names` depend on the reference and the contract alone: examinations of several
    candidates share them (`beside`).
    """

    contract: Contract
    fixed: set[int]
    seed: int
    faults: Faults = field(default_factory=Faults)
    tallies: dict[str, Tally] = field(default_factory=dict)
    noise: dict[str, SelfNoise] = field(default_factory=dict)  # by the tallies' names
    points: dict[str, Evidence] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cases: int = 0
    names: set[str] = field(default_factory=set)  # of all rounding points and intermediates
    flipped: int = 0
    noise_runs: int = 0
    golden: bool = True  # compare typical cases with FP64
    prefix: str = ""  # of the outputs' names: one tally for each kind of layer
    limits: dict[str, int] | None = None  # differing elements that end the examination, by tally

    def beside(self, fixed: set[int], limits: dict[str, int] | None) -> "Examination":
        """A fresh examination of another candidate on the same prepared cases."""
        return Examination(
            self.contract,
            fixed,
            self.seed,
            noise=self.noise,
            names=self.names,
            golden=self.golden,
            prefix=self.prefix,
            limits=limits,
        )

    @property
    def decided(self) -> bool:
        """Whether no further case can save the candidate; False without `limits`."""
        if self.limits is None:
            return False
        return self.faults.reason is not None or any(
            tally.differing > self.limits[key] for key, tally in self.tallies.items()
        )

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
            noise = self.noise.setdefault(key, SelfNoise())
            self.tallies[key] = Tally(key, self.numerics(output), noise)
        return self.tallies[key]

    def prepare(self, reference: nn.Module, case: Case, *, as_is: bool = False) -> Prepared:
        """Run the reference on the case; raises what the reference raises.

        The candidate is compared with the contract's replay or, with `as_is`, with the reference's
        own results.
        """
        with watching_integers(reference) as integers:
            first = replay(reference, case.args, NAMED, None, case.kwargs)
        first.integers = integers
        uses = (use for p in first.points for use in p.uses)
        self.names.update(p.name for p in (*first.points, *first.wides, *uses))
        self.names.update(f"{a}{IN}{m}" for a in ADDED for m, _ in reference.named_modules() if m)
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
        path = prepared.path
        for _ in range(runs):
            self.noise_runs += 1
            kind = self.noise_runs % kinds(prepared.device)
            noise = Noise(
                seed=self.seed * 100_003 + self.noise_runs,
                kind=kind,
                reorder="reduction" in classes or bool(prepared.first.choices),
            )
            plan = self.plan(noise=noise)
            case = prepared.case
            perturbed = replay(reference, case.args, plan, prepared.first, case.kwargs)
            deviations.add(prepared.first, perturbed)
            prepared.draws += 1
            for name, tensor in perturbed.results.items():
                if is_real(tensor.dtype) and self.numerics(name) != "exact":
                    tally, mask = self.tally(name), prepared.masks.get(name)
                    apart = (tensor != prepared.contract.results[name]).to(torch.uint8)
                    prepared.moved[name] = prepared.moved.get(name, 0) + apart
                    tally.add_noise(
                        prepared.where,
                        tensor,
                        prepared.contract.results[name],
                        mask,
                        typical=case.typical,
                        kind=kind,
                        path=path,
                    )

    def judge(
        self,
        reference: nn.Module,
        candidate: nn.Module,
        prepared: Prepared,
        deviations: Deviations,
    ) -> Observed | None:
        """Run the candidate on the case and compare all it did; None if that ended early."""
        try:
            seen = observe(candidate, reference, prepared.case, self.fixed)
            problem = faults.arguments_and_shapes(prepared.first, seen, prepared.initial)
            if problem is not None:
                self.faults.add("call", f"{problem} ({prepared.where})")
                return None
            self._compare(reference, prepared, seen, deviations)
            if not self.decided:
                self._repeat(reference, candidate, prepared, seen)
        except CandidateError as error:
            self.faults.add("call", f"raises {error} ({prepared.where})")
            return None
        self.cases += 1
        return seen

    def _compare(
        self, reference: nn.Module, prepared: Prepared, seen: Observed, deviations: Deviations
    ) -> None:
        results = self._results(prepared, seen)
        keep = self._routes(prepared, seen, deviations)
        golden = self.golden_results(reference, prepared)
        for name, mine in results.items():
            ours = prepared.contract.results[name]
            where = f"{name} ({prepared.where})"
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
                self.tally(name).add(prepared.where, mine, ours, mask)
                if golden is not None and mask is None:
                    self.tally(name).add_golden(mine, ours, golden[name])
            elif keep is None and not same_bits(mine, ours):
                self.faults.add("route", f"{where}: integers differ from the reference's")

    def golden_results(self, reference: nn.Module, prepared: Prepared) -> dict[str, Tensor] | None:
        """The FP64 results of a typical case."""
        case = prepared.case
        if prepared.golden is not None or not (case.typical and self.golden):
            return prepared.golden
        return replay(reference, case.args, GOLDEN, prepared.first, case.kwargs).results

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
                where = f"{name} ({prepared.where})"
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
            self.faults.add("route", f"{flips.unexplained} ({prepared.where})")
        return flips.rows

    def roundings(self, prepared: Prepared) -> list[tuple[Point, str]]:
        """What the candidate is told apart by in this case: each rounding, and what the contract
        says about it."""
        elides = self.contract.elides
        interior = [p for p in prepared.first.points if p.interior]
        found = [(p, "elided" if p.name in elides else "kept") for p in interior]
        partly = [p for p in interior if p.name not in elides]
        found += [(u, "elided" if u.name in elides else "kept") for p in partly for u in p.uses]
        found += [(p, "kept") for p in prepared.first.fusable]
        return found + [(_added_point(name), "added") for name in self.contract.adds]

    def flips(self, reference: nn.Module, prepared: Prepared) -> Iterator[Flip]:
        """For each rounding, the replay that differs from the contract's in it alone."""
        case = prepared.case
        for point, word in self.roundings(prepared):
            plan = self.plan()
            if word == "added":
                plan = self.plan(add=plan.add - {point.name})
            elif point.fused:
                plan = self.plan(fuse=frozenset((point.name,)))
            else:
                plan = self.plan(elide=plan.elide ^ {point.name})
            other = replay(reference, case.args, plan, prepared.first, case.kwargs).results
            flip = Flip(point, word, {n: t for n, t in other.items() if is_real(t.dtype)})
            if word == "kept" and IN not in point.name and not point.fused and case.typical:
                for name, tensor in flip.results.items():
                    ours, mask = prepared.contract.results[name], prepared.masks.get(name)
                    self.tally(name).add_elided(tensor, ours, mask)
            if word == "added":
                flip.noise = self._plain_noise(reference, prepared, plan, other)
            yield flip

    def weigh_points(self, reference: nn.Module, prepared: Prepared, seen: Observed) -> None:
        """For each rounding: which of two replays does the candidate equal where they differ?"""
        flips: Iterable[Flip] | None = prepared.flips
        weigh(
            self.points,
            self.flips(reference, prepared) if flips is None else flips,
            prepared.contract.results,
            self._results(prepared, seen),
            prepared.masks,
            prepared.moved,
            prepared.draws,
        )

    def _plain_noise(
        self, reference: nn.Module, prepared: Prepared, plan: Plan, plain: dict[str, Tensor]
    ) -> int:
        """How many elements noise changes in a replay without an added rounding."""
        self.noise_runs += 1
        noisy = replace(plan, noise=Noise(seed=self.seed * 100_003 + self.noise_runs))
        case = prepared.case
        results = replay(reference, case.args, noisy, prepared.first, case.kwargs).results
        real = [(n, t) for n, t in results.items() if is_real(t.dtype)]
        return sum(int(((t != plain[n]) & _counting(prepared, n, t)).sum()) for n, t in real)


def _counting(prepared: Prepared, name: str, like: Tensor) -> Tensor:
    """The elements that say something: of a written argument, those that one write decides."""
    mask = prepared.masks.get(name)
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask.expand_as(like)


def _added_point(name: str) -> Point:
    return Point(
        name=name, operator="", module="", source="", shape=(), dtype="", index=-1, added=True
    )
