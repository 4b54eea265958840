"""Rounds of candidates: their order, what their author is told, when the search ends."""

from dataclasses import replace

import pytest

from agents import search
from agents.history import History
from agents.search import Evaluated, Limits
from harness.ledger import Ledger
from harness.records import Attempt, Latency, Paired, PointReport, Status, UlpReport, Verdict

PASSED = Verdict(scope="region", passed=True, reason=None, cases=33, seed=0, outputs=(), points=())
POINT = PointReport(
    point="x", operator="mul", source="toy.py:3", declared="kept", observed="elided",
    visible_share=0.3, log_likelihood_ratio=-40.0,
)  # fmt: skip


def output(differing: float) -> UlpReport:
    return UlpReport(
        output="out",
        numerics="reduction",
        elements=1000,
        bit_equal_share=1 - differing,
        one_ulp_share=differing,
        worst_scaled=1.5,
        histogram={},
        worst_index=(0, 7),
        worst_values=(1.25, 1.5),
        noise_share=0.0,
        allowed_share=0.001,
        golden_error=0.1,
        reference_golden_error=0.1,
    )


def refused(cases: int = 33, differing: float = 0.3, points: tuple = ()) -> Verdict:
    outputs = (output(differing),) if cases else ()
    reason = f"{differing:g} differ"
    return replace(PASSED, passed=False, reason=reason, cases=cases, outputs=outputs, points=points)


def paired(gain: float) -> Paired:
    return Paired(
        base_us=100.0,
        candidate_us=100.0 - gain,
        candidate_interval_us=(99.0 - gain, 101.0 - gain),
        gain_us=gain,
        gain_interval_us=(gain - 1, gain + 1),
        mde_us=2.0,
        pairs=9,
    )


def candidate(
    file: str, gain: float | None = None, verdict: Verdict = PASSED, region: str = "norm"
) -> Evaluated:
    time = None if gain is None else paired(gain)
    return Evaluated(file=file, region=region, verdict=verdict, time=time, seconds=1.0)


def attempt(
    file: str, status: Status, verdict: Verdict | None = PASSED, reason: str = ""
) -> Attempt:
    latency = None
    if status is Status.KEPT:
        latency = Latency(decode=paired(10.0), prefill=paired(1.0))
    return Attempt(
        index=1, name=file, region="norm", backend="torch", status=status,
        reason=reason or f"it was {status}", predicted_us=None, bound_us=None, knobs={},
        region_verdict=verdict, model_verdict=None, latency=latency, control=None, parent=None,
        seconds=1.0,
    )  # fmt: skip


def test_what_goes_no_further_comes_first_then_the_most_gained_in_a_step() -> None:
    """A region that is called eight times counts eight times."""
    found = [
        candidate("uncalled"),
        candidate("good", 5.0),
        candidate("often", 2.0, region="swiglu"),
        candidate("slow", -5.0),
        candidate("wrong", verdict=refused()),
        candidate("uncertain", -0.5),
    ]
    order = [e.file for e in search.in_order(found, {"norm": 1, "swiglu": 8})]
    assert order == ["slow", "wrong", "often", "good", "uncertain", "uncalled"]
    words = search.no_faster(found[3])
    assert words.startswith("its region gets slower with it: one call of norm: 100.0 us without")
    assert search.beaten(found[5], found[1]) == (
        "good of the same round was kept in its place: one call of norm gains 5.0 us with that, "
        "-0.5 us with this one"
    )


NEARER = {
    "closer-to-its-bound": (refused(differing=0.002), refused(differing=0.3)),
    "more-cases": (refused(cases=33, differing=0.3), refused(cases=0)),
    "fewer-points": (refused(differing=0.3), refused(differing=0.3, points=(POINT,))),
}


@pytest.mark.parametrize("near, far", NEARER.values(), ids=NEARER.keys())
def test_the_failure_that_teaches_most_is_the_one_that_came_nearest(near, far) -> None:
    both = [attempt("far", Status.REJECTED, far), attempt("near", Status.REJECTED, near)]
    assert search.instructive(both) is both[1]
    assert search.instructive(both[::-1]) is both[1]


def test_the_model_is_told_each_outcome_and_all_about_the_best_and_one_failure() -> None:
    tried = [
        attempt("/run/a-1.py", Status.REJECTED, refused(differing=0.5), "half differs"),
        attempt("/run/b-2.py", Status.KEPT),
        attempt("/run/c-3.py", Status.REJECTED, refused(points=(POINT,)), "rounds at `x`"),
        attempt("/run/d-4.py", Status.REJECTED, reason="no gain"),
    ]
    found = {"/run/b-2.py": candidate("/run/b-2.py", 5.0)}
    said = search.outcome(4, tried, found).splitlines()
    assert said[0] == "round 4, 4 candidates: 1 kept, 3 rejected, 0 failed"
    assert said[1:5] == [
        "a-1.py: rejected: half differs",
        "b-2.py: kept: it was kept",
        "c-3.py: rejected: rounds at `x`",
        "d-4.py: rejected: no gain",
    ]
    best, worst = said.index("the best: b-2.py"), said.index("the most instructive failure: a-1.py")
    assert "one call of norm: 100.0 us without, 95.0 us with it; gain 5.0 us" in said[worst - 2]
    assert best < worst and "kept: it was kept" in said[best:worst]
    failure = "\n".join(said[worst:])
    assert "0.5 of 1,000 elements differ from the contract's replay, 0.001 may" in failure
    assert "at [0, 7]: 1.25 for 1.5" in failure and "c-3.py" not in failure


def test_of_a_round_of_one_the_decision_is_told_as_it_is() -> None:
    only = [attempt("/run/a-1.py", Status.REJECTED, refused(), "half differs")]
    assert search.outcome(1, only, {}).startswith("rejected: half differs\nregion verdict: reject")


def test_rounds_that_keep_nothing_end_the_search_and_a_kept_one_begins_the_count_anew(
    tmp_path,
) -> None:
    ledger = Ledger.create(tmp_path / "run")
    ledger.append("run", {"schema": 1})
    history, limits = History(ledger), Limits(plateau=2)

    def round_of(*tried: Attempt) -> str | None:
        assert search.begin(ledger, [a.name for a in tried]) == len(search.rounds(ledger))
        for one in tried:
            stop = search.ending(history, limits, None, None)
            assert stop is None or stop.reason == search.PLATEAU  # not while a round goes on
            ledger.append("attempt", one)
        stop = search.ending(history, limits, None, None)
        return None if stop is None else stop.why

    assert round_of(attempt("a", Status.REJECTED), attempt("b", Status.FAILED)) is None
    assert round_of(attempt("c", Status.REJECTED), attempt("d", Status.KEPT)) is None
    assert round_of(attempt("e", Status.REJECTED)) is None
    assert search.begin(ledger, ["e"]) == 3 and len(search.rounds(ledger)) == 3  # as continued
    search.begin(ledger, ["f", "g"])
    ledger.append("attempt", attempt("f", Status.REJECTED))
    assert search.ending(history, limits, None, None) is None
    ledger.append("attempt", attempt("g", Status.REJECTED))
    stop = search.ending(history, limits, None, None)
    assert stop is not None and stop.reason == "plateau"
    assert stop.why == "2 rounds in a row kept nothing; --plateau is 2"
    assert search.ending(history, Limits(plateau=3), None, None) is None


FLOORS = {
    "at-it": (90.0, 100.0, True),
    "above": (89.0, 100.0, False),
    "unknown": (None, 9.0, False),
}


@pytest.mark.parametrize("floor_us, step_us, ends", FLOORS.values(), ids=FLOORS.keys())
def test_a_step_near_its_floor_ends_the_search(floor_us, step_us, ends, tmp_path) -> None:
    ledger = Ledger.create(tmp_path / "run")
    ledger.append("run", {"schema": 1})
    stop = search.ending(History(ledger), Limits(), floor_us, step_us)
    assert (stop is not None and stop.reason == "floor") is ends
    if stop is not None:
        assert stop.why.endswith("90.0 of its 100.0 us, 90%; --floor-share is 90%")
