"""The gate of a run that requires the sandbox: no candidate runs in the run's own process before it
has passed its region's verdict in a worker.

Tuning, timing and the layers' verdict of what passed are done in the run's process.
"""

from collections.abc import Callable

from torch import nn

from harness.errors import UserError
from harness.judge import judge_region
from harness.ledger import Ledger
from harness.observe import CandidateError
from harness.protections import describe
from harness.records import Verdict
from harness.sandbox import Sandbox
from harness.sandboxed import broken
from harness.workload import Workload


class Gate:
    """Verdicts on changes by name or file, each in a worker of its own.

    UserError at the start where this machine lacks a protection.
    """

    def __init__(
        self, reference: nn.Module, workload: Workload, ledger: Ledger, say: Callable[[str], None]
    ) -> None:
        self.reference, self.workload = reference, workload
        self.sandbox = Sandbox(reference, workload.device, model=workload.name, required=True)
        try:
            self.sandbox.open(None).close()
        except BaseException:
            self.sandbox.close()
            raise
        rows = self.sandbox.protections
        ledger.append("sandbox", {"protections": [row.to_json() for row in rows]})
        say(describe(rows))

    def close(self) -> None:
        self.sandbox.close()

    def verdict(self, change: str, backend: str, seed: int) -> Verdict:
        """The region's verdict with default launch knobs; whatever the candidate does is in it."""
        try:
            candidate = self.sandbox.open(change, backend)
        except (CandidateError, UserError) as error:
            return broken(str(error), seed)
        try:
            assert candidate.change is not None and candidate.backend is not None
            verdict = judge_region(
                self.reference,
                candidate.model,
                candidate.change,
                candidate.backend,
                self.workload,
                seed,
            )
            verdict = candidate.judged(verdict)
        finally:
            candidate.close()
        return candidate.judged(verdict) if verdict.passed else verdict
