"""The judge judged: are all mutants of a region killed, and all honest changes accepted?"""

import copy
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from harness.errors import ExitCode, UserError
from harness.examine import Prepared
from harness.judge import judge_region
from harness.misuse import Mutant
from harness.observe import Observed
from harness.policy import ELIDED, Policy
from harness.records import Verdict
from harness.region import RegionCases
from harness.selftest import regions
from harness.trees import same_bits
from harness.workload import Workload
from optimized.catalog import for_model
from optimized.change import (
    Change,
    Contract,
    Implementation,
    apply_change,
    nodes,
    region_of,
    share,
)

KILLED, SURVIVED, EQUIVALENT = "killed", "survived", "equivalent"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the judge said about one mutant. `differing` counts elements with other bits than the
    reference's own, in the `cases` and `elements` that were run."""

    region: str
    kind: str
    what: str
    point: str
    operator: str
    source: str
    status: str
    reason: str
    cases: int
    elements: int
    differing: int
    seconds: float

    def __str__(self) -> str:
        place = f"`{self.point}` [{self.operator}] ({self.source})"
        return f"{self.kind} at {place}, {self.what}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Honest:
    """One verdict on a change that is right."""

    region: str
    name: str
    backend: str
    seed: int
    accepted: bool
    reason: str | None
    cases: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Against:
    """Counts the elements in which a candidate's bits are not the reference's own."""

    def __init__(self) -> None:
        self.cases = self.elements = self.differing = 0

    def __call__(self, prepared: Prepared, seen: Observed) -> None:
        self.cases += 1
        for name, ours in prepared.first.results.items():
            mine = seen.results.get(name, seen.arguments.get(name))
            assert mine is not None
            loose = prepared.first.unspecified.get(name)
            if loose is not None:
                ours, mine = ours.masked_fill(loose, 0), mine.masked_fill(loose, 0)
            self.elements += ours.numel()
            self.differing += _differing(ours, mine)


def _differing(ours: Tensor, mine: Tensor) -> int:
    if same_bits(ours, mine):
        return 0
    return max(1, int((ours != mine).sum()))  # at least the sign of a zero


def judge_mutant(region: str, cases: RegionCases, candidate: nn.Module, mutant: Mutant) -> Outcome:
    """Put the mutant into `candidate`, a tree that shares the reference's parameters, and judge it
    on the prepared cases until it is refused."""
    started = time.perf_counter()
    forwards = []
    for name in cases.names:
        original = cases.reference.get_submodule(name)
        forwards.append(mutant.build(original))
        put(candidate, name, original, forwards[-1])
    against = Against()
    verdict = cases.judge(candidate, "mutant", until_fault=True, watch=against)
    if not verdict.passed:
        status, reason = KILLED, verdict.reason or ""
    elif against.differing:
        status, reason = SURVIVED, closest(verdict, against)
    elif not any(getattr(f, "times", 1) for f in forwards):
        status, reason = SURVIVED, "the judged cases never reach the operator"
    else:
        status = EQUIVALENT
        reason = f"bit-identical in {against.cases} cases, {against.elements:,} elements"
    return Outcome(
        region=region,
        kind=mutant.kind,
        what=mutant.what,
        point=mutant.point,
        operator=mutant.operator,
        source=mutant.source,
        status=status,
        reason=reason,
        cases=against.cases,
        elements=against.elements,
        differing=against.differing,
        seconds=time.perf_counter() - started,
    )


def put(tree: nn.Module, name: str, original: nn.Module, forward: Callable[..., Any]) -> None:
    """Let the node called `name` in `tree` be `original` with another forward."""
    replaced = copy.copy(original)
    for part in ("_parameters", "_buffers", "_modules"):
        setattr(replaced, part, dict(getattr(original, part)))
    replaced.forward = forward
    parent, _, attribute = name.rpartition(".")
    setattr(tree.get_submodule(parent), attribute, replaced)


def closest(verdict: Verdict, against: Against) -> str:
    """How near a candidate that passed came to a limit."""
    shares = []
    for output in verdict.outputs:
        share = 1.0 - output.bit_equal_share
        if share:
            text = (
                f"{output.output}: {share:.2g} of {output.elements:,} elements differ, "
                f"{output.allowed_share:.2g} allowed, worst {output.worst_scaled:.2g} ULP"
            )
            shares.append((share / output.allowed_share if output.allowed_share else 0.0, text))
    nearest = max(shares)[1] if shares else "every output passes"
    return f"{against.differing} of {against.elements:,} elements differ; {nearest}"


def contract_of(region: str, workload: Workload) -> Contract:
    """The contract of the first catalogued change of the region; else reductions in any order."""
    for change, _ in for_model(workload.model, workload.device.type):
        if change.region == region and not change.contract.elides and not change.contract.adds:
            return change.contract
    return Contract(numerics="reduction")


def reference_change(region: str, contract: Contract) -> Change:
    """The reference as a change to itself."""
    same = Implementation(
        backend="reference", devices=("cpu", "cuda"), build=lambda node, knobs: node.forward
    )
    return Change(
        name="reference",
        region=region,
        summary="the reference itself",
        contract=contract,
        implementations=(same,),
    )


def honest_changes(workload: Workload, regions: list[str]) -> list[tuple[Change, str]]:
    """The reference itself in each region, and every catalogued change that the device can run."""
    device = workload.device.type
    found = [(reference_change(r, contract_of(r, workload)), "reference") for r in regions]
    for change, implementation in for_model(workload.model, device):
        if change.region in regions:
            found.append((change, implementation.backend))
    return found


def judge_honest(
    workload: Workload, changes: list[tuple[Change, str]], seeds: Iterator[int], count: int
) -> Iterator[Honest]:
    """`count` verdicts on changes that are right, each with a seed of its own; what was compiled
    for one serves the next of the same change."""
    each, more = divmod(count, len(changes)) if changes else (0, 0)
    for place, (change, backend) in enumerate(changes):
        runs = each + (place < more)
        if not runs:
            continue
        tree = share(workload.model)
        apply_change(tree, change, backend)
        for seed in itertools.islice(seeds, runs):
            declared = Policy.allowing((ELIDED, *change.contract.adds))
            verdict = judge_region(
                workload.model, tree, change, backend, workload, seed, policy=declared
            )
            yield Honest(
                region=change.region,
                name=change.name,
                backend=backend,
                seed=seed,
                accepted=verdict.passed,
                reason=verdict.reason,
                cases=verdict.cases,
            )


def regions_of(workload: Workload, wanted: list[str] | None) -> list[str]:
    """The regions of all modules that may have rounding points and those of catalogued changes, or
    those of them that are wanted; UserError for one without nodes.

    What holds a list of layers is judged layer by layer (`harness.layers`), never as a whole.
    """
    model = workload.model
    catalogued = (c.region for c, _ in for_model(model, workload.device.type))
    called = [region_of(m) for name, m in model.named_modules() if name and _is_called(m)]
    known = list(dict.fromkeys([*regions(model), *called, *catalogued]))
    for region in wanted or ():
        if not nodes(model, region):
            raise UserError(
                f"model {workload.name} has no region {region!r}; it has: {', '.join(known)}"
            )
    return wanted or known


def _is_called(module: nn.Module) -> bool:
    """Whether the module computes something itself, and is no stack of layers."""
    computes = type(module).forward is not nn.Module.forward
    return computes and not any(isinstance(m, nn.ModuleList) for m in module.modules())


def chosen(count: int, limit: int | None, sample: int | None, seed: int) -> list[int]:
    """Of `count` mutants the first `limit`, or `sample` drawn by `seed`; all without either."""
    if sample is not None:
        return sorted(random.Random(seed).sample(range(count), min(sample, count)))
    return list(range(count))[:limit]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How a group of mutants fared; those that were `left` were not judged."""

    made: int
    killed: int
    survived: int
    equivalent: int
    left: int = 0


def counted(outcomes: Iterable[Outcome], left: int = 0) -> Counts:
    words = Counter(o.status for o in outcomes)
    return Counts(
        made=words.total() + left,
        killed=words[KILLED],
        survived=words[SURVIVED],
        equivalent=words[EQUIVALENT],
        left=left,
    )


def exit_code(outcomes: list[Outcome], honest: list[Honest]) -> ExitCode:
    if not outcomes and not honest:
        return ExitCode.OUT_OF_BUDGET
    wrong = any(o.status == SURVIVED for o in outcomes) or any(not h.accepted for h in honest)
    return ExitCode.FOUND if wrong else ExitCode.DONE
