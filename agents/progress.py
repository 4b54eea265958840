"""Live progress on stderr: what is going on, and how much of the budget is left. Torch-free."""

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from agents.budget import Budget
from agents.pulse import Pulse


class Progress:
    """One line per finished piece of work, and on a terminal a live line for the current one."""

    def __init__(
        self, budget: Budget, console: Console | None = None, pulse: Pulse | None = None
    ) -> None:
        """`pulse` reaches whoever watches this process."""
        self.budget, self.pulse = budget, pulse or Pulse()
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Status | None = None

    def part(self, text: str) -> None:
        """Tell only who watches what begins now: a part of a stage."""
        self.pulse.tell(stage=text)

    def stage(self, text: str) -> None:
        """Say what begins now."""
        self.part(text)
        left = max(0.0, self.budget.left_s)
        line = f"[dim]{self._elapsed()}[/dim] {escape(text)} [dim]({left / 60:.1f} min left)[/dim]"
        if self.console.is_terminal:
            self.close()
            self._status = self.console.status(line)
            self._status.start()
        else:
            self.console.print(line)

    def done(self, text: str, style: str = "") -> None:
        """Say what came of it."""
        line = escape(text)
        if style:
            line = f"[{style}]{line}[/{style}]"
        self.console.print(f"[dim]{self._elapsed()}[/dim] {line}")

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _elapsed(self) -> str:
        return f"{self.budget.total_s - self.budget.left_s:6.1f}s"
