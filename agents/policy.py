"""The keep rule, torch-free: what a change must show to stay."""

from dataclasses import dataclass

from harness.records import Audit, Latency, Paired, Status, Verdict


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of a change, and why in one sentence."""

    status: Status
    reason: str


def decide(
    *,
    target: str,
    region_verdict: Verdict | None,
    model_verdict: Verdict | None,
    latency: Latency | None,
    floors_us: dict[str, float | None],
    audit: Audit | None = None,
) -> Decision:
    """Keep a change only if it is right, its target surely gets faster, and nothing gets slower.

    `target` is "decode" or "prefill"; `floors_us` holds the shortest time that the step's bytes and
    operations allow on this machine, or None where no ceiling was measured. Verdicts, latency and
    audit come in the order in which they are taken; the first that refuses decides.
    """
    for verdict in (region_verdict, model_verdict):
        if verdict is not None and not verdict.passed:
            return Decision(
                status=Status.REJECTED, reason=f"{verdict.scope} verdict: {verdict.reason}"
            )
    if latency is None:
        raise ValueError("a passed verdict without a latency cannot be decided")
    measured = {"decode": latency.decode, "prefill": latency.prefill}
    for name, pair in measured.items():
        floor = floors_us.get(name)
        if floor is not None and pair.candidate_us < floor:
            return Decision(
                status=Status.REJECTED,
                reason=f"{name} of {pair.candidate_us:.1f} us is below the floor of {floor:.1f} us "
                "that its bytes and operations allow: a wrong measurement, or skipped work",
            )
    if audit is not None and audit.reason is not None:
        return Decision(status=Status.REJECTED, reason=f"audit: {audit.reason}")
    gain = measured.pop(target)
    if not gain.is_faster:
        return Decision(status=Status.REJECTED, reason=_not_faster(target, gain))
    for name, pair in measured.items():
        if pair.is_slower:
            return Decision(
                status=Status.REJECTED,
                reason=f"{name} got slower by {_figures(pair, sign=-1)}, although {target} "
                f"gained {gain.gain_us:.1f} us",
            )
    others = " and ".join(
        f"{name} got no slower (a loss of {pair.mde_us:.1f} us would show)"
        for name, pair in measured.items()
    )
    return Decision(status=Status.KEPT, reason=f"{target} gained {_figures(gain)}; {others}")


def _figures(pair: Paired, sign: int = 1) -> str:
    low, high = sorted(sign * value for value in pair.gain_interval_us)
    return (
        f"{sign * pair.gain_us:.1f} us [{low:.1f}, {high:.1f}] "
        f"(smallest detectable effect {pair.mde_us:.1f} us)"
    )


def _not_faster(target: str, pair: Paired) -> str:
    if pair.is_slower:
        return f"{target} got slower by {_figures(pair, sign=-1)}"
    return f"{target} gained no more than noise: {_figures(pair)}"
