"""Routing flips: what is a near-tie, and what is listed."""

import pytest
import torch
from torch import Tensor

from harness.replay import Choice
from harness.routes import LISTED, Deviations, find_flips, routing

VALUES = torch.tensor([[0.9, 0.5, 0.499, 0.1], [0.8, 0.3, 0.2, 0.1]])
OURS = torch.tensor([[0, 1], [0, 1]])
NOISE = 0.002  # of the largest value, 0.9: two values 0.0036 apart may change places


def flips(
    mine: Tensor, ours: Tensor = OURS, values: Tensor = VALUES
) -> tuple[str | None, Deviations]:
    deviations = Deviations(relative={0: NOISE}, where="layer, step")
    kept = Choice(values, ours.shape[-1])
    found = find_flips([("gate", ours, mine)], [kept], deviations)
    return found.unexplained, deviations


def test_equal_choices_are_counted() -> None:
    unexplained, found = flips(OURS.clone())
    assert unexplained is None
    record = routing([found])
    assert record is not None and (record.rows, record.flipped, record.flips) == (2, 0, ())
    assert routing([Deviations()]) is None


def test_a_near_tie_is_explained_and_listed_with_its_margin() -> None:
    unexplained, found = flips(torch.tensor([[0, 2], [0, 1]]))
    assert unexplained is None
    record = routing([found])
    assert record is not None and (record.rows, record.flipped) == (2, 1)
    (flip,) = record.flips
    assert (flip.where, flip.output, flip.row) == ("layer, step", "gate", 0)
    assert flip.margin == pytest.approx(0.001, rel=1e-3)
    assert flip.limit == pytest.approx(2 * NOISE * 0.9)
    assert flip.excess < 0


@pytest.mark.parametrize(
    ("mine", "margin"),
    [
        pytest.param([[0, 1], [0, 2]], "0.1", id="another-expert"),
        pytest.param([[0, 3], [0, 1]], "0.4", id="though-a-tie-is-beside-it"),
        pytest.param([[1, 0], [0, 1]], "0.4", id="order-reversed"),
        pytest.param([[0, 0], [0, 1]], "masked out", id="chosen-twice"),
        pytest.param([[0, 7], [0, 1]], "masked out", id="out-of-range"),
    ],
)
def test_other_choices_are_no_near_ties(mine: list[list[int]], margin: str) -> None:
    unexplained, found = flips(torch.tensor(mine))
    assert unexplained is not None
    assert unexplained.startswith("gate routes 1 row(s) differently")
    assert f"above its self-noise ({margin}, 0.0036 is noise)" in unexplained
    assert found.flips[0].excess > 0


def test_sets_that_are_not_in_order_are_compared_as_sets() -> None:
    ours = torch.tensor([[1, 0]])  # by expert, not by value
    values = VALUES[:1].flip(-1)[:, [3, 0, 1, 2]]  # 0.9, 0.1, 0.499, 0.5
    ours = torch.tensor([[3, 0]])
    assert flips(torch.tensor([[2, 0]]), ours, values)[0] is None
    assert flips(torch.tensor([[1, 0]]), ours, values)[0] is not None


def test_what_an_earlier_choice_masked_out_needs_a_tie_there() -> None:
    """Two groups of two; the candidate opens the other group."""
    masked = torch.tensor([[0.7, 0.6, 0.5, -torch.inf, -torch.inf, -torch.inf]])
    ours, mine = torch.tensor([[0, 1]]), torch.tensor([[3, 4]])
    for apart, passes in ((0.001, True), (0.1, False)):
        groups = Choice(torch.tensor([[0.7, 0.7 - apart]]), 1)
        deviations = Deviations(relative={0: NOISE, 1: NOISE})
        found = find_flips([("gate", ours, mine)], [groups, Choice(masked, 2)], deviations)
        assert (found.unexplained is None) == passes
        assert deviations.flips[0].margin == pytest.approx(apart, rel=1e-3)


def test_a_tie_where_nothing_is_noisy_is_none() -> None:
    values = torch.tensor([[0.5, 0.5, 0.1]])
    found = find_flips(
        [("gate", torch.tensor([[0]]), torch.tensor([[1]]))], [Choice(values, 1)], Deviations()
    )
    assert found.unexplained is not None


def test_the_list_holds_the_worst_of_many() -> None:
    rows = 3 * LISTED
    gaps = torch.linspace(0.0001, 0.003, rows)
    values = torch.stack((torch.full((rows,), 0.5), 0.5 - gaps, torch.zeros(rows)), dim=-1)
    ours, mine = torch.zeros(rows, 1).long(), torch.ones(rows, 1).long()
    _, found = flips(mine, ours, values)
    record = routing([found])
    assert record is not None and (record.flipped, len(record.flips)) == (rows, LISTED)
    assert record.flips[0].row == rows - 1
    assert record.flips[0].margin == pytest.approx(0.003, rel=1e-3)
