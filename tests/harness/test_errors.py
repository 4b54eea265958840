"""Where an error came from, for who has only its message."""

import pytest
import torch

from agents.budget import Budget, BudgetSpent
from harness.errors import raised_at


def test_the_innermost_place_of_ours_is_named() -> None:
    with pytest.raises(BudgetSpent) as theirs:
        Budget(1.0).require(1e9)
    assert raised_at(theirs.value).startswith(" (agents/budget.py:")
    with pytest.raises(RuntimeError) as mine:
        torch.empty(3) @ torch.empty(4)
    assert raised_at(mine.value).startswith(" (tests/harness/test_errors.py:")


def test_an_error_that_was_never_raised_has_no_place() -> None:
    assert raised_at(ValueError("new")) == ""
