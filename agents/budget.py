"""The run's time budget, torch-free: how long there is, and who may use how much of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

RESERVE = 0.08  # of the budget, kept back for the closing measurements and the reports


class BudgetSpent(Exception):
    """The budget ended; what was decided so far stands."""


@dataclass
class Budget:
    """`minutes` of wall time, of which `used_s` seconds went by before now."""

    minutes: float
    used_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    @property
    def total_s(self) -> float:
        return self.minutes * 60

    @property
    def left_s(self) -> float:
        return self.total_s - self.used_s - (self.clock() - self.started_s)

    def share_s(self, fraction: float, *, at_most_s: float) -> float:
        """Seconds that one measurement may take: a fraction of the whole, with a cap."""
        return min(fraction * self.total_s, at_most_s)

    def require(self, seconds: float = 0.0) -> None:
        """Raise BudgetSpent unless `seconds` are left beside the reserve."""
        if not self.has(0.0):
            raise BudgetSpent(f"{self.minutes:g} minutes are used up")
        if not self.has(seconds):
            raise BudgetSpent(
                f"of {self.minutes:g} minutes {self.left_s:.0f} s are left, and what is next takes "
                f"about {seconds:.0f}"
            )

    def has(self, seconds: float) -> bool:
        """Whether `seconds` are left beside the reserve."""
        return self.left_s >= seconds + RESERVE * self.total_s
