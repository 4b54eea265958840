"""What the elements that show a rounding say, where noise moves them."""

from harness.replay import Point
from harness.verdicts import NOT_VISIBLE, point_report, visible_rate
from harness.weigh import Evidence


def told(visible, declared, flipped, drawn, moved, *, fused=False, **more):
    where = {"operator": "", "module": "", "source": "", "shape": (), "dtype": "", "index": 0}
    point = Point(name="p", fused=fused, **where)
    counts = {"visible": visible, "equals_declared": declared, "equals_flipped": flipped}
    return Evidence(point, "kept", elements=10**6, drawn=drawn, moved=moved, **counts, **more)


def test_elements_that_noise_takes_to_either_side_tell_no_rounding():
    """A rounding far below the noise shows in a few elements next to a boundary; they move
    together, so forty of them are no forty witnesses."""
    assert point_report(told(100, 30, 70, 800, 0), 1e-4).observed == "elided"
    assert point_report(told(100, 30, 70, 800, 380), 1e-4).observed == NOT_VISIBLE
    assert point_report(told(100, 2, 98, 800, 90), 1e-4).observed == "elided"


def test_a_few_moved_elements_count_as_all_others_do():
    """Where the visible elements may be as noisy as all, the rate of all is what counts."""
    assert visible_rate(told(100, 50, 50, 800, 1), 1e-3) == 0.0
    assert visible_rate(told(100, 50, 50, 800, 200), 1e-3) == 0.25
    assert visible_rate(told(100, 50, 50, 0, 0), 1e-3) == 0.0


def test_what_noise_moves_nowhere_else_is_told_by_few_elements():
    """A fused multiply-add of the reference's own code: 26 elements, half of the noise replays move
    each, and 40 others, in none of which it differs."""
    alone = told(26, 0, 26, 104, 52, stirred=40.0, differs_flipped=0)
    assert alone.strayed == 0
    assert point_report(alone, 1e-4).observed == "elided"
    noisy = told(26, 0, 26, 104, 52, stirred=40.0, differs_flipped=38)
    assert noisy.strayed == 38
    assert point_report(noisy, 1e-4).observed == NOT_VISIBLE
    honest = told(26, 26, 0, 104, 52, stirred=40.0, differs_flipped=26)
    assert (honest.strayed, point_report(honest, 1e-4).observed) == (0, "kept")


def test_two_elements_are_no_fused_multiply_add():
    """Few elements show one at all, and those next to a boundary are noisier than all others: two
    that an honest kernel takes to the other side say nothing. A kernel that fuses shows in many."""
    few = {"drawn": 16, "moved": 0}
    assert point_report(told(2, 0, 2, **few), 1e-4).observed == "elided"
    assert point_report(told(2, 0, 2, **few, fused=True), 1e-4).observed == NOT_VISIBLE
    assert point_report(told(60, 2, 58, 480, 2, fused=True), 1e-4).observed == "elided"
    assert point_report(told(60, 58, 2, 480, 2, fused=True), 1e-4).observed == "kept"
