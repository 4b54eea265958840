"""The keep rule on figures whose answer is known."""

import pytest

from agents.policy import decide
from harness.records import Audit, AuditedCall, Clocks, Latency, Paired, Status, Verdict

NO_FLOORS: dict[str, float | None] = {"decode": None, "prefill": None}


def verdict(passed: bool = True, scope: str = "region") -> Verdict:
    reason = None if passed else "rounds once where the reference rounds at `post_norm`"
    return Verdict(
        scope=scope, passed=passed, reason=reason, cases=3, seed=1, outputs=(), points=()
    )


def pair(gain: float, spread: float = 1.0, mde: float = 2.0, base: float = 100.0) -> Paired:
    return Paired(
        base_us=base,
        candidate_us=base - gain,
        candidate_interval_us=(base - gain - spread, base - gain + spread),
        gain_us=gain,
        gain_interval_us=(gain - spread, gain + spread),
        mde_us=mde,
        pairs=50,
    )


def decision(decode: Paired, prefill: Paired, target: str = "decode", **more):
    facts = {"model_verdict": None, "floors_us": NO_FLOORS, **more}
    latency = Latency(decode=decode, prefill=prefill)
    return decide(target=target, region_verdict=verdict(), latency=latency, **facts)


def test_keeps_a_gain_beyond_the_smallest_effect():
    kept = decision(pair(10.0), pair(0.5))
    assert kept.status is Status.KEPT
    assert "decode gained 10.0 us [9.0, 11.0]" in kept.reason
    assert kept.reason.endswith("; prefill got no slower (a loss of 2.0 us would show)")


@pytest.mark.parametrize("gain", [0.0, 1.9, -0.5], ids=["none", "below-mde", "slightly-slower"])
def test_refuses_what_noise_could_explain(gain):
    refused = decision(pair(gain), pair(0.0))
    assert refused.status is Status.REJECTED
    assert "no more than noise" in refused.reason


def test_refuses_a_gain_whose_interval_reaches_zero():
    assert decision(pair(3.0, spread=4.0), pair(0.0)).status is Status.REJECTED


def test_refuses_a_slowdown_with_its_figures():
    refused = decision(pair(-5.0), pair(0.0))
    assert refused.status is Status.REJECTED
    assert "got slower by 5.0 us [4.0, 6.0]" in refused.reason


def test_refuses_when_the_other_target_gets_slower():
    refused = decision(pair(10.0), pair(-8.0))
    assert refused.status is Status.REJECTED
    assert "prefill got slower by 8.0 us" in refused.reason


def test_prefill_target_is_judged_on_prefill():
    assert decision(pair(0.0), pair(10.0), target="prefill").status is Status.KEPT
    assert decision(pair(10.0), pair(0.0), target="prefill").status is Status.REJECTED


def test_refuses_what_is_faster_than_its_bytes_allow():
    refused = decision(pair(10.0), pair(0.0), floors_us={"decode": 95.0, "prefill": None})
    assert refused.status is Status.REJECTED
    assert "below the floor of 95.0 us" in refused.reason


def test_refuses_a_prefill_that_is_faster_than_its_operations_allow():
    refused = decision(pair(10.0), pair(0.0), floors_us={"decode": None, "prefill": 101.0})
    assert refused.status is Status.REJECTED
    assert "prefill of 100.0 us is below the floor of 101.0 us" in refused.reason
    assert "skipped work" in refused.reason


def call(reason: str | None, step: str = "decode") -> AuditedCall:
    return AuditedCall(
        step=step, when="after timing", seed=3, compared_with="the module", reason=reason
    )


def clocks(reason: str | None) -> Clocks:
    return Clocks(
        inside_us=1.0, outside_us=2.0, difference_us=1.0, spread_us=0.1, gap_us=0.0, reason=reason
    )


def test_a_failed_audit_refuses_a_gain():
    fine = Audit(calls=(call(None), call(None, "prefill")), clocks=clocks(None))
    assert decision(pair(10.0), pair(0.0), audit=fine).status is Status.KEPT
    stale = Audit(calls=(call(None), call("out is stale", "prefill")), clocks=clocks(None))
    refused = decision(pair(10.0), pair(0.0), audit=stale)
    assert refused.status is Status.REJECTED
    assert refused.reason == "audit: prefill, after timing: out is stale"


def test_clocks_that_disagree_refuse_a_gain():
    refused = decision(pair(10.0), pair(0.0), audit=Audit(calls=(), clocks=clocks("they differ")))
    assert (refused.status, refused.reason) == (Status.REJECTED, "audit: they differ")


def test_a_failed_verdict_decides_before_any_latency():
    refused = decide(
        target="decode",
        region_verdict=verdict(passed=False),
        model_verdict=None,
        latency=None,
        floors_us=NO_FLOORS,
    )
    assert refused.status is Status.REJECTED
    assert "region verdict: rounds once" in refused.reason


def test_a_failed_model_verdict_refuses_a_gain():
    refused = decision(pair(10.0), pair(0.0), model_verdict=verdict(False, "model"))
    assert refused.status is Status.REJECTED
    assert refused.reason.startswith("model verdict")


def test_faster_and_slower_exclude_each_other():
    for gain in (-10.0, -1.0, 0.0, 1.0, 10.0):
        assert not (pair(gain).is_faster and pair(gain).is_slower)
