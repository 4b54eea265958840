"""A round's candidates: judged and timed at region level in the sandbox, and put in order."""

import time
from collections.abc import Sequence

from agents import search
from agents.calls import caller
from agents.claude.desk import Desk
from agents.proposers.base import Beforehand, Context, Suggestion, suggest_file
from agents.search import Evaluated
from harness.records import Attempt, Status
from harness.region_bench import RegionBench

Submitted = Sequence[tuple[str, str]]  # change files with their hypotheses


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
        found = self.evaluate(files)
        calls = {o.region: o.node_count for o in context.opportunities}
        decided = self.decided()
        return [
            self.suggestion(e, hypotheses[e.file], context, found)
            for e in search.in_order(found, calls)
            if e.file not in decided
        ]

    def decided(self) -> dict[str, Attempt]:
        return {a.name: a for a in self.history.attempts}

    def evaluate(self, files: Sequence[str]) -> list[Evaluated]:
        """Each at region level, once."""
        known = search.evaluated(self.ledger)
        for number, file in enumerate(files, start=1):
            if file in known:
                continue
            self.session.budget.require()
            what = f"candidate {number} of {len(files)}: {search.name(file)}"
            self.session.progress.stage(f"{what}: its region in the sandbox")
            known[file] = self.evaluate_one(file, self.session.workload.seed + len(known))
            self.ledger.append(search.EVALUATED, known[file])
        return [known[file] for file in files]

    def evaluate_one(self, file: str, seed: int) -> Evaluated:
        started = time.monotonic()
        sandbox = self.desk.gate().sandbox
        bench = RegionBench(self.session.workload, sandbox, caller(self.session))
        found = bench.evaluate(file, None, seed)
        return Evaluated(
            file=file,
            region=found.region or "",
            verdict=found.verdict,
            time=found.time,
            call=found.call,
            seconds=round(time.monotonic() - started, 1),
        )

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
