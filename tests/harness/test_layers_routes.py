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
        pytest.param([[0, 0], [0, 1]], "none", id="chosen-twice"),
        pytest.param([[0, 7], [0, 1]], "none", id="out-of-range"),
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


def grouped(scores: Tensor, groups: int, kept: int, k: int) -> tuple[Tensor, list[Choice]]:
    """The best `kept` of groups by their two best, and the best `k` of those."""
    parts = scores.unflatten(-1, (groups, -1))
    sums = parts.topk(2, dim=-1).values.sum(-1)
    best = sums.sort(dim=-1, descending=True, stable=True).indices[:, :kept]
    opened = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, best, True)
    allowed = parts.masked_fill(~opened[..., None], -torch.inf).flatten(-2)
    order = allowed.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :k], [Choice(parts, 2), Choice(sums, kept), Choice(allowed, k)]


def told(ours: Tensor, mine: Tensor, choices: list[Choice], noise: float) -> Deviations:
    deviations = Deviations(relative=dict.fromkeys(range(3), noise))
    deviations.where = find_flips([("gate", ours, mine)], choices, deviations).unexplained or ""
    return deviations


def test_a_group_that_noise_closes_explains_the_experts_that_are_gone() -> None:
    """Those of the group that is opened need not be among the best: nothing that was chosen then
    was masked out, and what is chosen is far from what was."""
    generator, noise = torch.Generator().manual_seed(0), 2e-4
    gone = 0
    for _ in range(12):
        scores = torch.sigmoid(torch.randn(8000, 256, generator=generator))
        noisy = scores + noise * (2 * torch.rand(scores.shape, generator=generator) - 1)
        (ours, choices), (mine, _) = grouped(scores, 8, 4, 8), grouped(noisy, 8, 4, 8)
        assert told(ours, mine, choices, noise).where == ""
        before, after = (choices[2].values.gather(-1, chosen) for chosen in (ours, mine))
        apart = (before - after.sort(dim=-1, descending=True).values).abs().amax(-1)
        gone += int((torch.isfinite(apart) & (apart > 4 * noise)).sum())
    assert gone > 5


def row(*groups: list[float]) -> Tensor:
    """One token's scores: those named, and zeros for the rest of each group's eight."""
    return torch.tensor([[*[s for g in groups for s in [*g, *[0.0] * (8 - len(g))]]]])


GROUPS = [0.9, 0.8, 0.75], [0.85, 0.78, 0.72], [0.82, 0.5]
NEAR = row(*GROUPS, [0.66, 0.659])  # of the last two groups 1.32 and 1.319
BETTER = row(*GROUPS, [0.95, 0.369])
APART = row(*GROUPS, [0.66, 0.559])
GONE = [0, 8, 1, 9, 2, 10]  # the best without those of the third group


@pytest.mark.parametrize(
    ("scores", "mine", "passes"),
    [
        pytest.param(NEAR, GONE, True, id="its-experts-gone"),
        pytest.param(NEAR, [0, 8, 1, 9, 2, 11], False, id="not-the-best-of-the-others"),
        pytest.param(NEAR, [8, 16, 9, 10, 17, 11], False, id="another-group-gone"),
        pytest.param(NEAR, [0, 0, 8, 1, 9, 2], False, id="one-twice"),
        pytest.param(BETTER, GONE, False, id="the-group-in-its-place-has-a-better-one"),
        pytest.param(APART, GONE, False, id="no-near-tie"),
    ],
)
def test_a_group_is_closed_only_by_a_near_tie_and_for_the_best_of_what_is_then_there(
    scores: Tensor, mine: list[int], passes: bool
) -> None:
    ours, choices = grouped(scores, 4, 3, 6)
    assert ours[0].tolist() == [0, 8, 16, 1, 9, 2]
    found = told(ours, torch.tensor([mine]), choices, 0.001)
    assert (found.where == "") == passes


def test_a_row_that_is_masked_out_otherwise_has_no_groups_and_the_others_have() -> None:
    ours, choices = grouped(torch.cat((NEAR, NEAR)), 4, 3, 6)
    mine = torch.tensor([GONE, GONE])
    assert told(ours, mine, choices, 0.001).where == ""
    choices[2].values[0, 3] = -torch.inf
    assert "routes 1 row(s) differently, row 0" in told(ours, mine, choices, 0.001).where
    _, choices = grouped(torch.cat((NEAR, NEAR)), 4, 3, 6)
    assert "routes 2 row(s)" in told(ours, mine, choices[1:], 0.001).where  # what was is not known
    small = ours.to(torch.int16), mine.to(torch.int16)
    assert told(*small, choices, 0.001).where == ""
