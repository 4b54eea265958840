"""The process that stands beside a run: when the run's own one dies, it goes on. Torch-free.

A candidate that passed the sandbox is tuned, timed and judged layer by layer in the run's process.
Should it fault there, hang, exit or fork without end, this process records it as failed, with what
was going on, and begins the run's process again as a continued run on the same budget.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents import lock
from agents.budget import Budget
from agents.faults import Renew
from agents.history import MAX_DEATHS, Started
from agents.life import Life, begin, take_signals
from agents.pulse import Pulse
from harness import cli
from harness.errors import ExitCode, UserError
from harness.ledger import Event, Ledger
from harness.records import Status

TICK_S = 0.25
PATIENCE_S = 30.0  # for a process to end that was asked to, or that said it would
AT_ONCE_S = 1.0  # two signals within this count as one
# Without a word for this share of the budget, and at least so many seconds, a process hangs. One
# stage of a change takes seconds to a minute or two; a baseline compiles for many.
CHANGE_SHARE, CHANGE_S = 0.25, 240.0
STAGE_SHARE, STAGE_S = 0.5, 600.0
# These codes mean that the run came to its end, which then stands in its ledger.
ENDED = ExitCode.DONE, ExitCode.FOUND, ExitCode.OUT_OF_BUDGET

Work = Callable[[Path | None, float, Pulse], int]


class Supervisor:
    """Runs `work(directory, used_s, pulse)` in a process of its own until it comes to its end.

    `directory` is None at first, then the run to go on with; `used_s` is how much of the budget is
    used up. `stall_minutes` replaces the limit on a stage of a change that shows no progress.
    """

    def __init__(self, work: Work, directory: Path | None, stall_minutes: float | None) -> None:
        self.work, self.directory = work, directory
        self.stall_minutes = stall_minutes
        self.budget: Budget | None = None
        self.interrupt_s: float | None = None  # when somebody first wanted the run to end
        self.insisted = False
        self.fruitless = 0  # lives in a row that died without a change kept or rejected
        self.seen = 0  # events in the ledger when this life began
        self.working = False  # this is the run's process

    def run(self) -> int:
        """The exit code. UserError where the run's process dies and nothing can be done."""
        try:
            code = self.supervise()
            if not self.working and code in ENDED and self.directory is not None:
                self.compare(self.directory)
            return code
        finally:
            lock.let_go()

    def supervise(self) -> int:
        taken = take_signals()
        try:
            while True:
                self.seen = len(self.events())
                life = begin(taken)
                if isinstance(life, Pulse):
                    taken = set()  # the new process has them back
                    self.working = True
                    return self.live(life)
                reason = self.watch(life, taken)
                code = self.end_of(life) if reason is None else None
                if code is not None:
                    return code
                if self.interrupt_s is not None:
                    return self.interrupted()
                self.bury(reason or life.how(), life.told)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)

    def live(self, pulse: Pulse) -> int:
        """In the run's process: work, and tell how that ended."""
        used_s = 0.0 if self.budget is None else self.budget.total_s - self.budget.left_s

        def work() -> int:
            try:
                return self.work(self.directory, used_s, pulse)
            except Renew as error:
                pulse.tell(renew=str(error))
                os._exit(ExitCode.SELF_TEST)  # a spoilt process may not even end

        try:
            code = cli.run(work)
        except BaseException as error:  # noqa: BLE001 - told, with its traceback
            traceback.print_exc()
            pulse.tell(broke=" ".join(f"{type(error).__name__}: {error}".split()))
            os._exit(ExitCode.FOUND)
        pulse.tell(end=int(code))
        return code

    def watch(self, life: Life, taken: set[signal.Signals]) -> str | None:
        """Until it has ended; why it was ended from here, if it was."""
        asked = False
        ending_s: float | None = None
        while not life.over():
            came = signal.sigtimedwait(taken, TICK_S)
            if came is not None:
                self.take(came.si_signo, life)
            life.listen()
            self.hear(life.told)
            if self.interrupt_s is not None and not asked:
                asked = life.interrupt()
            if ending_s is None and (asked or life.told.keys() & {"end", "renew", "broke"}):
                ending_s = time.monotonic()
            late = ending_s is not None and time.monotonic() - ending_s > PATIENCE_S
            reason = None if late or self.insisted else self.stalled(life) or life.crowded()
            if late or self.insisted or reason is not None:
                life.end()
                return reason
        while (came := signal.sigtimedwait(taken - {signal.SIGCHLD}, 0)) is not None:
            self.take(came.si_signo, life)  # it came while the process ended
        self.hear(life.told)
        return None

    def take(self, number: int, life: Life) -> None:
        """A signal from outside. The first of those that end a run asks, a later one insists; some
        callers send two at once."""
        if number == signal.SIGTSTP:
            life.pause()
        elif number != signal.SIGCHLD:
            now = time.monotonic()
            self.insisted = self.interrupt_s is not None and now - self.interrupt_s > AT_ONCE_S
            self.interrupt_s = self.interrupt_s or now

    def hear(self, told: dict[str, Any]) -> None:
        if self.directory is None and "directory" in told:
            self.directory = Path(told["directory"])
        if self.budget is None and "budget" in told:
            self.budget = Budget(float(told["budget"]))

    def stalled(self, life: Life) -> str | None:
        """That it showed no progress for longer than is allowed, or None."""
        total_s = 0.0 if self.budget is None else self.budget.total_s
        change_s = max(CHANGE_S, CHANGE_SHARE * total_s)
        if self.stall_minutes is not None:
            change_s = 60 * self.stall_minutes
        stage_s = max(STAGE_S, STAGE_SHARE * total_s, change_s)
        idle_s = life.idle_s
        if idle_s <= change_s:
            return None
        limit_s = stage_s if self.in_progress() is None else change_s
        return f"made no progress for {limit_s / 60:.2g} minutes" if idle_s > limit_s else None

    def end_of(self, life: Life) -> int | None:
        """The exit code of a process that came to its end; None for one that did not."""
        code, events = life.told.get("end"), self.new_events()
        if code == ExitCode.INTERRUPTED and self.interrupt_s is None:
            return None  # nobody interrupted it but itself
        at_its_end = code in (*ENDED, ExitCode.INTERRUPTED)
        if at_its_end and events and events[-1].kind != "stopped":
            return None
        return code

    def events(self) -> list[Event]:
        if self.directory is None or not (self.directory / Ledger.NAME).exists():
            return []
        return list(Ledger(self.directory).events())

    def new_events(self) -> list[Event]:
        """What this life wrote."""
        return self.events()[self.seen :]

    def in_progress(self) -> Event | None:
        """The event with which this life began a change that is not decided."""
        found = None
        for event in self.new_events():
            if event.kind in ("started", "attempt"):
                found = event if event.kind == "started" else None
        return found

    def bury(self, how: str, told: dict[str, Any]) -> None:
        """Record what the process died of; UserError where the run cannot go on."""
        if sys.stderr.isatty():
            print("\r\x1b[2K\x1b[?25h", end="", file=sys.stderr)  # its live line, its hidden cursor
        stage, renewed = told.get("stage", "its start"), told.get("renew")
        fate = renewed or f"the run's process {how}, at: {stage}"
        if self.directory is None or not self.events():
            raise UserError(fate)
        lock.take(Ledger(self.directory))  # the next process that works has it from this one
        ledger, begun = Ledger(self.directory), self.in_progress()
        blamed = self.last_tried() if begun or renewed else {}
        ledger.append("died", {"how": renewed or how, "stage": stage, **blamed})
        tried = False
        if begun is not None:
            started = Started.from_json(begun.data)
            tried = started.control is None
            seconds = time.time() - begun.time_s
            ledger.append("attempt", started.ended(Status.FAILED, fate, seconds))
            self.say(f"{Status.FAILED}: {started.name} ({started.backend}): {fate}", "dim")
        self.fruitless = 0 if self.fruit() else self.fruitless + 1
        if not (tried or renewed):
            fate += ", while no change was tried"
        elif self.fruitless >= MAX_DEATHS:
            fate += f"; that is {MAX_DEATHS} times in a row without a change kept or rejected"
        else:
            self.say(f"going on in a new process{f': {renewed}' if renewed else ''}", "yellow")
            return
        self.report()
        raise UserError(f"{fate}; continue with --resume {self.directory}")

    def last_tried(self) -> dict[str, Any]:
        """Which change this life began last."""
        events = [e for e in self.new_events() if e.kind in ("started", "attempt")]
        return {n: events[-1].data[n] for n in ("index", "name", "backend")} if events else {}

    def fruit(self) -> bool:
        """Whether this life kept or rejected a change."""
        decided = [e.data for e in self.new_events() if e.kind == "attempt"]
        return any(a["control"] is None and a["status"] != Status.FAILED for a in decided)

    def interrupted(self) -> int:
        """What an interrupted process does, for one that could not."""
        events = self.events()
        if self.directory is None or not events:
            return cli.fail("interrupted", ExitCode.INTERRUPTED)
        if events[-1].kind != "stopped":
            lock.take(Ledger(self.directory))
            Ledger(self.directory).append("stopped", {"reason": "interrupted"})
        self.report()
        self.say(f"interrupted; continue with --resume {self.directory}", "yellow")
        return ExitCode.INTERRUPTED

    def report(self) -> None:
        from reports.write import write_reports

        assert self.directory is not None
        try:
            write_reports(self.directory)
        except Exception:  # noqa: BLE001 - it must not hide how the run ended
            traceback.print_exc()

    def compare(self, directory: Path) -> None:
        """Execute the notebooks of what was kept: here, for the run's process may have given up the
        sockets that their kernels need."""
        from reports.pr_notebook import after_run

        try:
            said = after_run(directory)
        except Exception:  # noqa: BLE001 - it must not hide how the run ended
            traceback.print_exc()
        else:
            if said is not None:
                self.say(said, "dim")

    def say(self, text: str, style: str) -> None:
        from agents.progress import Progress

        Progress(self.budget or Budget(0.0)).done(text, style)
