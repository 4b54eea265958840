"""Records survive JSON, refuse what they cannot be, and hash by content."""

import json
from dataclasses import replace

import pytest

from harness.records import (
    Attempt,
    Baseline,
    Latency,
    Paired,
    PointReport,
    Status,
    Timing,
    UlpReport,
    Verdict,
)

TIMING = Timing(median_us=10.5, interval_us=(10.0, 11.0), samples=40)
PAIRED = Paired(
    base_us=20.0,
    candidate_us=15.0,
    candidate_interval_us=(14.5, 15.5),
    gain_us=5.0,
    gain_interval_us=(4.0, 6.0),
    mde_us=0.5,
    pairs=30,
)
VERDICT = Verdict(
    scope="region",
    passed=True,
    reason=None,
    cases=3,
    seed=7,
    outputs=(
        UlpReport(
            output="h",
            numerics="reduction",
            elements=100,
            bit_equal_share=0.99,
            one_ulp_share=0.01,
            worst_scaled=1.0,
            histogram={"0": 99, "1": 1},
            worst_index=(0, 3),
            worst_values=(1.0, 1.5),
            noise_share=1e-5,
            allowed_share=1e-4,
            golden_error=1e-3,
            reference_golden_error=1e-3,
        ),
    ),
    points=(
        PointReport(
            point="post_norm",
            operator="aten.to",
            source="beam.py:10",
            declared="kept",
            observed="kept",
            visible_share=0.3,
            log_likelihood_ratio=12.0,
        ),
    ),
)
ATTEMPT = Attempt(
    index=1,
    name="swiglu",
    region="swiglu",
    backend="triton",
    status=Status.KEPT,
    reason="faster",
    predicted_us=4.0,
    bound_us=None,
    knobs={"T=1": {"block": 128, "fused": True, "order": "rows", "ratio": 0.5}},
    region_verdict=VERDICT,
    model_verdict=None,
    latency=Latency(decode=PAIRED, prefill=PAIRED),
    control=None,
    parent=None,
    seconds=1.5,
)


@pytest.mark.parametrize(
    "record", [TIMING, PAIRED, VERDICT, ATTEMPT], ids=lambda r: type(r).__name__
)
def test_a_record_survives_json(record):
    again = type(record).from_json(json.loads(json.dumps(record.to_json())))
    assert again == record
    assert again.id == record.id


def test_knobs_keep_their_types():
    again = Attempt.from_json(json.loads(json.dumps(ATTEMPT.to_json())))
    assert [type(v) for v in again.knobs["T=1"].values()] == [int, bool, str, float]


def test_a_whole_number_becomes_a_float_where_one_is_meant():
    timing = Timing.from_json({"median_us": 10, "interval_us": [9, 11], "samples": 3})
    assert isinstance(timing.median_us, float)
    assert timing.interval_us == (9.0, 11.0)


def test_the_id_follows_the_content():
    assert TIMING.id == replace(TIMING).id
    assert TIMING.id != replace(TIMING, samples=41).id
    assert len(TIMING.id) == 12


def test_an_unknown_field_is_named():
    with pytest.raises(ValueError, match="Timing has no field .'mean_us'.; known: .*'median_us'"):
        Timing.from_json({**TIMING.to_json(), "mean_us": 1.0})


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="Timing: .*'samples'"):
        Timing.from_json({"median_us": 1.0, "interval_us": [1.0, 1.0]})


def test_a_status_of_another_version_is_refused():
    with pytest.raises(ValueError, match="'maybe' is not a valid Status"):
        Attempt.from_json({**ATTEMPT.to_json(), "status": "maybe"})


def test_no_latency_without_a_passed_verdict():
    failed = replace(VERDICT, passed=False, reason="elided post_norm")
    for verdict in (None, failed):
        with pytest.raises(ValueError, match="a latency without a passed verdict"):
            replace(ATTEMPT, status=Status.REJECTED, region_verdict=verdict)


def test_kept_needs_a_latency():
    with pytest.raises(ValueError, match="kept without a latency"):
        replace(ATTEMPT, latency=None)


@pytest.mark.parametrize(("passed", "reason"), [(True, "why"), (False, None)])
def test_a_verdict_has_a_reason_exactly_when_it_fails(passed, reason):
    with pytest.raises(ValueError, match="a reason exactly when it did not pass"):
        replace(VERDICT, passed=passed, reason=reason)


@pytest.mark.parametrize(("decode", "absent"), [(None, None), (TIMING, "no GPU")])
def test_a_baseline_has_times_or_the_reason_for_none(decode, absent):
    with pytest.raises(ValueError, match="either times or a reason"):
        Baseline(name="graph", decode=decode, prefill=None, absent=absent)
