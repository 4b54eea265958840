"""What the elements that show a rounding say, where noise moves them."""

from harness.replay import Point
from harness.verdicts import NOT_VISIBLE, point_report, visible_rate
from harness.weigh import Evidence


def told(visible, declared, flipped, drawn, moved):
    point = Point(name="p", operator="", module="", source="", shape=(), dtype="", index=0)
    counts = {"visible": visible, "equals_declared": declared, "equals_flipped": flipped}
    return Evidence(point, "kept", elements=10**6, drawn=drawn, moved=moved, **counts)


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
