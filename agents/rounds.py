"""A round's candidates: judged and timed at region level in the sandbox, and put in order."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from agents import search
from agents.claude.desk import Desk
from agents.evaluate import Evaluation, ask, many
from agents.proposers.base import Beforehand, Context, Suggestion, suggest_file
from agents.search import Evaluated
from agents.workspace import Refused
from harness.records import Attempt, Status
from harness.region_bench import Found
from harness.sandboxed import broken
from harness.seeds import draw

Submitted = Sequence[tuple[str, str]]  # change files with their hypotheses


class Asked(NamedTuple):
    file: str
    hypothesis: str
    seed: int  # of the verdict's cases


class Rounds:
    """Of one run; all that it knows is in the ledger, so a continued run pays nothing twice."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.session = desk, desk.session
        self.ledger, self.history = desk.ledger, desk.session.history

    def suggestions(self, submitted: Submitted, context: Context) -> list[Suggestion]:
        """What of the round is undecided: first what goes no further than its region, then by what
        it gains in a step."""
        hypotheses = dict(submitted)
        files = [file for file, _ in submitted]
        search.begin(self.ledger, files)
        found = self.evaluate(submitted)
        calls = {o.region: o.node_count for o in context.opportunities}
        decided = self.decided()
        return [
            self.suggestion(e, hypotheses[e.file], context, found)
            for e in search.in_order(found, calls)
            if e.file not in decided
        ]

    def decided(self) -> dict[str, Attempt]:
        return {a.name: a for a in self.history.attempts}

    def evaluate(self, submitted: Submitted) -> list[Evaluated]:
        """Each at region level, once."""
        known = search.evaluated(self.ledger)
        left = [one for one in submitted if one[0] not in known]
        asked = [Asked(*one, draw()) for one in left]
        judge = self.here if self.session.executor is None else self.elsewhere
        for found in judge(asked):
            self.ledger.append(search.EVALUATED, found)
            known[found.file] = found
        return [known[file] for file, _ in submitted]

    def here(self, asked: Sequence[Asked]) -> Iterator[Evaluated]:
        """One after the other, with the run's own model."""
        bench = self.desk.gate().bench
        for number, one in enumerate(asked, start=1):
            self.session.budget.require()
            what = f"candidate {number} of {len(asked)}: {search.name(one.file)}"
            self.session.progress.stage(f"{what}: its region in the sandbox")
            started = time.monotonic()
            try:
                with self.draft(one) as file:
                    found = bench.evaluate(file, None, one.seed)
            except Refused as error:
                found = Found(region=None, backend=None, verdict=broken(str(error), one.seed))
            yield Evaluated(
                file=one.file,
                region=found.region or "",
                verdict=found.verdict,
                time=found.time,
                call=found.call,
                seconds=round(time.monotonic() - started, 1),
            )

    def elsewhere(self, asked: Sequence[Asked]) -> Iterator[Evaluated]:
        """All at once, on the run's workers."""
        assert self.session.executor is not None
        self.session.budget.require()
        self.session.progress.stage(f"{len(asked)} candidates: their regions, on workers")
        wanted: dict[str, Evaluation] = {}
        for one in asked:
            try:
                with self.draft(one) as file:
                    evaluation = ask(
                        self.session.workload,
                        file,
                        case_seed=one.seed,
                        targets=self.targets(),
                        required=self.desk.gate().sandbox.required,
                    )
            except Refused as error:
                yield Evaluated(
                    file=one.file,
                    region="",
                    verdict=broken(str(error), one.seed),
                    time=None,
                    seconds=0.0,
                )
            else:
                wanted[one.file] = evaluation
        seeds = {one.file: one.seed for one in asked}
        made = many(self.session.executor, list(wanted.values()), self.session.progress.part)
        for file, found in zip(wanted, made, strict=True):
            yield Evaluated(
                file=file,
                region=found.region or "",
                verdict=found.verdict or broken(found.failure or "no verdict", seeds[file]),
                time=found.time,
                call=found.call,
                seconds=round(found.seconds, 1),
                worker=found.worker,
                losses=found.losses,
            )

    def targets(self) -> tuple[str, ...]:
        """The timed steps, the run's target first."""
        timed = self.session.timed_targets
        return tuple(
            timed[kind] for kind in sorted(timed, key=lambda k: k != self.session.measure.kind)
        )

    def draft(self, one: Asked) -> AbstractContextManager[str]:
        drafts = self.session.drafts
        if drafts is None:
            return nullcontext(one.file)
        return drafts.draft(one.file, one.hypothesis)

    def suggestion(
        self, e: Evaluated, hypothesis: str, context: Context, found: Sequence[Evaluated]
    ) -> Suggestion:
        made = suggest_file(e.file, self.desk.look(e.file), context, hypothesis)
        refused = None
        if e.verdict.passed:
            refused = search.no_faster(e) if e.slower else self.beaten(e, context, found)
        known = Beforehand(verdict=e.verdict, seconds=e.seconds, refused=refused)
        return Suggestion(
            proposal=made.proposal, change=made.change, foreign=True, beforehand=known
        )

    def beaten(self, e: Evaluated, context: Context, found: Sequence[Evaluated]) -> str | None:
        """That another one of the round was kept for this region, or None."""
        if context.free(e.region):
            return None
        decided = self.decided()
        kept = [o for o in found if o.file in decided and decided[o.file].status is Status.KEPT]
        return search.beaten(e, kept[-1]) if kept else None
