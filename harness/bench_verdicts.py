"""How each peer rounds, under the contract of our change for the same region."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from harness.bench_peers import COMPILED, FAILURES, TORCH, Ours, PeerBench, said
from harness.errors import SelfTestError
from harness.record import Record
from harness.records import PointReport, Verdict
from harness.region import RegionCases
from optimized.change import apply_change, share
from optimized.peers.peer import Peer

NOT_VISIBLE = "not visible"


@dataclass(frozen=True, kw_only=True)
class PeerVerdict(Record):
    """The judge's word on one peer; `passed` is None where it could not be judged."""

    region: str
    peer: str
    contract: str  # the change whose contract it was judged under
    passed: bool | None
    reason: str | None  # why it failed, or was not judged
    differing: float | None  # the largest share of an output's elements that differ
    points: tuple[str, ...]  # where it rounds otherwise than declared
    notes: tuple[str, ...] = ()

    def words(self) -> str:
        if self.passed is None:
            return f"not judged: {self.reason}"
        if self.passed:
            return "passed"
        return f"failed: {'; '.join(self.points) or self.reason}"


def verdicts(bench: PeerBench, note: Callable[[str], None]) -> Iterator[PeerVerdict]:
    """The libraries' functions first, then torch.compile, of every region until the deadline."""
    by_region: dict[str, Ours] = {}
    for ours in bench.ours:
        by_region.setdefault(ours.change.region, ours)
    for late in (False, True):
        for region, ours in by_region.items():
            rivals = [
                p for p in bench.rivals(region) if p.name != TORCH and (p.name == COMPILED) == late
            ]
            present = [p for p in rivals if bench.absent.get(p.name) is None]
            if present:
                note(f"judging {region}: {', '.join(p.name for p in present)}")
                yield from _judge(bench, ours, present)


def _judge(bench: PeerBench, ours: Ours, rivals: Sequence[Peer]) -> Iterator[PeerVerdict]:
    workload, contract = bench.workload, ours.change.contract
    cases: RegionCases | None = None
    for rival in rivals:
        if bench.spent:
            yield _unjudged(ours, rival, "the budget was spent before")
            continue
        change = rival.change(contract)
        backend = change.implementations[0].backend
        tree = share(workload.model)
        try:
            apply_change(tree, change, backend)
            if cases is None:
                cases = RegionCases.prepare(
                    workload.model, change.region, contract, workload, workload.seed
                )
            yield _verdict(ours, rival, cases.judge(tree, backend))
        except (*FAILURES, SelfTestError) as error:
            yield _unjudged(ours, rival, said(error))
            torch.cuda.empty_cache()


def _verdict(ours: Ours, rival: Peer, verdict: Verdict) -> PeerVerdict:
    shares = [1 - output.bit_equal_share for output in verdict.outputs]
    return PeerVerdict(
        region=rival.region,
        peer=rival.name,
        contract=ours.change.name,
        passed=verdict.passed,
        reason=verdict.reason,
        differing=max(shares, default=None),
        points=tuple(map(_point, _broken(verdict))),
        notes=verdict.notes,
    )


def _unjudged(ours: Ours, rival: Peer, reason: str) -> PeerVerdict:
    return PeerVerdict(
        region=rival.region,
        peer=rival.name,
        contract=ours.change.name,
        passed=None,
        reason=reason,
        differing=None,
        points=(),
    )


def _broken(verdict: Verdict) -> list[PointReport]:
    return [p for p in verdict.points if p.observed not in (p.declared, NOT_VISIBLE)]


def _point(point: PointReport) -> str:
    return f"{point.point} ({point.source}): declared {point.declared}, {point.observed}"
