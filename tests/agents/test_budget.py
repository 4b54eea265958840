"""The time budget, on a clock that the test moves."""

import pytest

from agents.budget import RESERVE, Budget, BudgetSpent


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_left_counts_down_and_require_keeps_a_reserve():
    clock = Clock()
    budget = Budget(2.0, clock=clock)
    assert budget.left_s == 120.0
    clock.now = 120.0 * (1 - RESERVE) - 1.0
    budget.require()
    clock.now += 2.0
    with pytest.raises(BudgetSpent, match="2 minutes are used up"):
        budget.require()


def test_require_refuses_work_that_would_not_fit():
    budget = Budget(1.0, clock=Clock())
    budget.require(50.0)
    assert budget.has(50.0)
    assert not budget.has(58.0)
    with pytest.raises(BudgetSpent, match="of 1 minutes 60 s are left, and what is next .* 58"):
        budget.require(58.0)


def test_share_is_a_fraction_with_a_cap():
    budget = Budget(10.0, clock=Clock())
    assert budget.share_s(0.01, at_most_s=30.0) == 6.0
    assert budget.share_s(0.1, at_most_s=30.0) == 30.0
