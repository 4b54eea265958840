"""From what an examination measured to a verdict: every limit is derived here."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from harness import bounds
from harness.compare import Tally
from harness.examine import Examination
from harness.explain import Explanation, Sample, explain, percent
from harness.records import Drift, PointReport, Routing, UlpReport, Verdict
from harness.weigh import Evidence

NOT_VISIBLE = "not visible"
NEITHER = "neither"  # most elements equal neither replay: something else is wrong
OPPOSITE = {"kept": "elided", "elided": "kept", "added": "kept"}
FEW_MOVED = 8  # elements by which noise is told from a single event
UNCALLED = "nothing was judged: the reference calls none of these modules"


def verdict(
    exam: Examination,
    scope: str,
    samples: list[Sample],
    backend: str | None = None,
    *,
    routing: Routing | None = None,
    drift: Drift | None = None,
) -> Verdict:
    """The record, from all that was pooled."""
    if not exam.cases:
        exam.faults.add("call", UNCALLED)
    if exam.unknown:
        names = ", ".join(f"`{name}`" for name in exam.unknown)
        exam.faults.add("policy", f"its contract names {names}, which the region does not round at")
    outputs = tuple(output_report(exam, t) for t in exam.tallies.values())
    rate = noise_rate(exam)
    points = tuple(point_report(e, rate) for e in exam.points.values())
    # A rounding that is declared as added and not there makes no kernel wrong.
    wrong = [p for p in points if p.observed not in (p.declared, NOT_VISIBLE, NEITHER)]
    wrong = [p for p in wrong if p.declared != "added"]
    notes = list(exam.notes)
    if samples and (wrong or "share" in exam.faults.found):
        found = None
        try:
            found = explain(samples, exam.plan())
        except torch.OutOfMemoryError:
            notes.append("what explains it was not looked for: the replays do not fit into memory")
        if found is not None:
            exam.faults.add("points", found.text())
            points = explained(points, found)
    if wrong:
        names = " and at ".join(
            f"`{p.point}` ({p.source}, {percent(p.visible_share)} of the elements show it)"
            for p in wrong
        )
        exam.faults.add("points", f"does not round as its contract says at {names}")
    reason = exam.faults.reason
    if exam.flipped and "route" not in exam.faults.found:
        said = f"{exam.flipped} row(s) routed differently, each a near-tie of the reference"
        if routing is not None and (most := routing.largest) is not None:
            said += f"; largest margin {most.margin:.3g}, {most.limit:.3g} is noise ({most.where})"
        notes.append(said)
    notes.append(
        f"false alarm {bounds.FALSE_ALARM:g} an output; {exam.noise_runs} noise replays"
        + (f"; backend {backend}" if backend else "")
    )
    return Verdict(
        scope=scope,
        passed=reason is None,
        reason=reason,
        cases=exam.cases,
        seed=exam.seed,
        outputs=outputs,
        points=points,
        notes=tuple(notes),
        routing=routing,
        drift=drift,
    )


def output_report(exam: Examination, tally: Tally) -> UlpReport:
    """The record of one output; adds a fault for each limit it breaks."""
    noisy, seen = tally.self_noise.count, tally.self_noise.draws
    allowed, paths = 0, list[bounds.Limit]()
    if tally.numerics != "exact":
        sizes = {case: kept for case, (_, kept) in tally.counts.items()}
        whole, *paths = bounds.limits(tally.noise, sizes, tally.self_noise.spread)
        allowed = whole.allowed
    share = tally.differing / tally.elements if tally.elements else 0.0
    allowed_share = allowed / tally.elements if tally.elements else 0.0
    noise_share = noisy / seen if seen else 0.0
    if tally.differing > allowed:
        exam.faults.add(
            "share",
            f"{tally.output}: {percent(share)} of {tally.elements} elements differ from the "
            f"contract's replay, {percent(allowed_share)} allowed ({tally.numerics}; "
            f"self-noise {percent(noise_share)}); most in {_most(tally)}",
        )
    for limit in paths:
        differing = sum(tally.counts[case][0] for case in limit.cases)
        if differing > limit.allowed:
            exam.faults.add(
                "share",
                f"{tally.output}: {percent(differing / limit.elements)} of {limit.elements} "
                f"elements differ from the contract's replay in the {len(limit.cases)} of "
                f"{len(tally.counts)} cases that {path_words(limit, paths)}, "
                f"{percent(limit.allowed / limit.elements)} allowed there ({tally.numerics}); most "
                f"in {_most(tally, limit.cases)}",
            )
    for case, (worst, elements) in tally.distances.items():
        limit = distance_limit(tally, case, elements)
        if tally.numerics != "exact" and worst > limit:
            exam.faults.add(
                "distance",
                f"{tally.output}: an element is {worst:.3g} ULPs of its row's largest off, "
                f"{limit:.3g} allowed ({case})",
            )
    for ulps, rows in tally.far.items():
        most = far_limit(tally, ulps)
        if tally.numerics == "reduction" and rows > most:
            exam.faults.add(
                "distance",
                f"{tally.output}: {rows} of {tally.rows} rows have an element more than {ulps:g} "
                f"ULPs of the row's largest off, {most} are noise",
            )
    mine, ours = golden_errors(tally)
    limit = golden_limit(tally, allowed)
    if mine > limit:
        exam.faults.add(
            "golden",
            f"{tally.output}: relative error to FP64 {mine:.3g}, the contract's replay has "
            f"{ours:.3g}, at most {limit:.3g} is noise",
        )
    return UlpReport(
        output=tally.output,
        numerics=tally.numerics,
        elements=tally.elements,
        bit_equal_share=tally.equal / tally.elements if tally.elements else 1.0,
        one_ulp_share=tally.one / tally.elements if tally.elements else 0.0,
        worst_scaled=tally.worst,
        histogram=tally.histogram,
        worst_index=tally.worst_index,
        worst_values=tally.worst_values,
        noise_share=noise_share,
        allowed_share=allowed_share,
        golden_error=mine,
        reference_golden_error=ours,
    )


def distance_limit(tally: Tally, case: str, elements: int) -> float:
    """The largest scaled distance that is noise: the largest that noise showed in the same case, or
    in all typical ones for one of them, taken on to the false-alarm level, and one ULP, the least
    by which two roundings differ. Cases without noise replays of their own are typical ones, and
    pooled.

    Where no noise was seen at all, what an interior rounding that flips moves is: what follows may
    magnify a flip, which is rare; it moves a value by a unit, eliding its rounding by half of one
    at most."""
    noise = tally.noise.get(case)
    if noise is None:
        elements = tally.elements
    group = [noise] if noise else []
    if noise is None or noise.typical:
        group = [n for n in tally.noise.values() if n.typical]
    draws = sum(n.draws for n in group)
    if not draws:
        return 1.0
    # Few flips make a distance, each rare: its tail falls as an exponential's, not as a normal's.
    if noise is not None and not noise.typical:
        # Seen in a few replays: what never moved there says nothing about how far an element does.
        moved = sum(noise.counts)
        elements, draws = math.ceil(elements * moved / draws), max(FEW_MOVED, moved)
    seen = max(n.worst for n in group) * bounds.extreme_factor(elements, draws) ** 2
    return 1.0 + (seen or 2 * tally.self_noise.elided)


def far_limit(tally: Tally, ulps: float) -> int:
    """How many rows may have an element further off than `ulps`: as for differing elements. Rows,
    for one flip before a norm or a product moves many elements of its row."""
    return bounds.allowed([n.rows_beyond(ulps) for n in tally.noise.values()], tally.rows)


def golden_errors(tally: Tally) -> tuple[float, float]:
    """||x - golden|| / ||golden|| of the candidate and of the contract's replay."""
    norm = math.sqrt(tally.golden_norm)
    if not norm:
        return 0.0, 0.0
    return math.sqrt(tally.candidate_error) / norm, math.sqrt(tally.replay_error) / norm


def golden_limit(tally: Tally, allowed: int) -> float:
    """The relative error that the replay would have if noise worked against it: as many elements
    as may differ, each moved by the most that noise moves one (or by the last place of the largest
    result), or, where noise moves most elements, all moved by its root mean square."""
    norm = math.sqrt(tally.golden_norm)
    if not norm:
        return math.inf
    factor = bounds.extreme_factor(tally.elements, max(2, tally.self_noise.draws))
    if 2 * tally.self_noise.count > tally.self_noise.draws:
        moved = tally.golden_elements * tally.self_noise.square * factor**2
    else:
        moved = allowed * max(tally.quantum, tally.self_noise.peak * factor) ** 2
    return math.sqrt(tally.replay_error + moved) / norm


def point_report(evidence: Evidence, rate: float) -> PointReport:
    """The record of one interior point; `rate` is the chance that noise changes an element. Where
    those that show the rounding are clearly noisier, theirs counts: a rounding far below the noise
    shows in elements next to a boundary, which noise takes to either side, many at once. What is
    quieter than noise everywhere else is so there, too."""
    rate = max(rate, visible_rate(evidence, rate) * quiet(evidence))
    weight = math.log((1.0 - rate) / rate)
    ratio = (evidence.equals_declared - evidence.equals_flipped) * weight
    if evidence.declared == "added":
        ratio = _added_ratio(evidence)
    observed = evidence.declared
    if evidence.visible == 0 or abs(ratio) < -math.log(bounds.FALSE_ALARM):
        observed = NOT_VISIBLE
    elif 2 * (evidence.equals_declared + evidence.equals_flipped) < evidence.visible:
        observed = observed if evidence.declared == "added" else NEITHER
    elif ratio < 0:
        observed = OPPOSITE[evidence.declared]
    return PointReport(
        point=evidence.point.name,
        operator=evidence.point.operator,
        source=evidence.point.source,
        declared=evidence.declared,
        observed=observed,
        visible_share=evidence.visible / evidence.elements if evidence.elements else 0.0,
        log_likelihood_ratio=ratio,
    )


def visible_rate(evidence: Evidence, rate: float) -> float:
    """How often noise changed an element that shows the rounding, at most one half; 0 where that
    may be `rate`, as for all elements. Of a sum that a fused multiply-add would compute, how often
    it may at most have changed one: only elements next to a boundary show that, so there are few,
    and what moved none of them in a few replays may yet move two."""
    if not evidence.drawn:
        return 0.0
    if evidence.point.fused:
        return min(0.5, bounds.upper_rate(evidence.moved, evidence.drawn))
    still = evidence.drawn - evidence.moved
    lowest = 1.0 - bounds.upper_rate(still, evidence.drawn)
    return min(0.5, evidence.moved / evidence.drawn) if lowest > rate else 0.0


def quiet(evidence: Evidence) -> float:
    """At most how noisy the candidate is, as a share of the noise replays, by the elements that do
    not show the rounding."""
    others = evidence.elements - evidence.visible
    if evidence.stirred <= 0 or others <= 0:
        return 1.0
    most = bounds.upper_rate(max(0, evidence.strayed), others) * others
    return min(1.0, most / evidence.stirred)


def _added_ratio(evidence: Evidence) -> float:
    """Log-likelihood of an added rounding against none, from how many elements differ from the
    replay without it: which ones do depends on the scale at which the kernel rounds."""
    if not evidence.visible:
        return 0.0
    share = min(0.5, evidence.visible / evidence.elements)
    rate = min(share, bounds.upper_rate(evidence.noise, evidence.elements))
    differing, equal = evidence.differs_flipped, evidence.elements - evidence.differs_flipped
    return differing * math.log(share / rate) + equal * math.log((1 - share) / (1 - rate))


def explained(points: tuple[PointReport, ...], found: Explanation) -> tuple[PointReport, ...]:
    """The reports with what the explanation says was observed."""
    elided = {p.name for p in (*found.elided, *found.fused)}
    kept = {p.name for p in found.kept}
    return tuple(
        replace(p, observed="elided")
        if p.point in elided
        else replace(p, observed="kept")
        if p.point in kept
        else p
        for p in points
    )


def noise_rate(exam: Examination) -> float:
    """An upper bound of the chance that noise changes an element, at most one half."""
    counts = sum(t.self_noise.count for t in exam.tallies.values())
    sizes = sum(t.self_noise.draws for t in exam.tallies.values())
    return min(0.5, bounds.upper_rate(counts, sizes)) if sizes else bounds.FALSE_ALARM


def path_words(limit: bounds.Limit, paths: Sequence[bounds.Limit]) -> str:
    """What sets a path apart: an operator that it alone has, or lacks."""
    others = frozenset[tuple[str, str, str]]().union(
        *(other.path or () for other in paths if other is not limit)
    )
    mine = limit.path or frozenset()
    for has, points in (("go through", mine - others), ("lack", others - mine)):
        if points:
            _, operator, source = min(points)
            return f"{has} {operator} at {source}"
    return "go through all that the others do"


def _most(tally: Tally, among: Collection[str] = ()) -> str:
    """The case, of those named or of all, in which most elements differ."""
    shares = {case: k / n for case, (k, n) in tally.counts.items() if n}
    case = max(among or shares, key=lambda name: shares.get(name, 0.0))
    return f"{case}: {percent(shares[case])}"
