"""Figures as text."""

import pytest

from reports import text


@pytest.mark.parametrize(
    ("us", "expected"),
    [
        (0.95, "0.9500 µs"),
        (45.123, "45.12 µs"),
        (823.44, "823.4 µs"),
        (16_021.0, "16.02 ms"),
        (1_147_000.0, "1.147 s"),
        (-74.0, "−74.00 µs"),
        (0.0, "0 µs"),
        (None, "–"),
        (float("inf"), "inf s"),
    ],
)
def test_time(us: float | None, expected: str) -> None:
    assert text.time(us) == expected


def test_pairs_share_unit_and_places() -> None:
    assert text.path(1000.0, 760.0) == "1.000 → 0.760 ms"
    assert text.interval((990.0, 1010.0)) == "[0.990, 1.010] ms"
    assert text.interval((752.4, 767.6), 4, 1000.0) == "[0.752, 0.768] ms"
    assert text.interval((-8.0, 142.0), 3) == "[−8, 142] µs"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(2.8e-6, "2.8e-6"), (0.32, "0.32"), (0.0, "0"), (1.0, "1"), (None, "–")],
)
def test_share(value: float | None, expected: str) -> None:
    assert text.share(value) == expected


def test_counts_and_knobs() -> None:
    assert text.count(1, "case") == "1 case"
    assert text.count(12, "case") == "12 cases"
    assert text.count(65536) == "65,536"
    assert text.knobs({"D=64,T=1": {"BLOCK": 512, "warps": 4}}) == "D=64,T=1: BLOCK=512, warps=4"
    assert text.knobs({}) == "–"


def test_device_says_plainly_where_it_ran() -> None:
    assert text.device("cuda", "NVIDIA H200") == "Ran on the GPU: NVIDIA H200."
    assert text.device("cpu", "Xeon", 1) == "Ran on the CPU: Xeon, 1 thread. No GPU was used."


def test_an_estimate_and_its_interval_are_in_one_unit():
    assert text.estimate(998.0, (959.4, 1103.4)) == "1.00 ms [0.96, 1.10] ms"
    assert text.estimate(-2.72, (-98.0, 208.0)) == "−3 µs [−98, 208] µs"
    assert text.estimate(0.0, (0.0, 0.0)) == "0 µs [0, 0] µs"
