"""Does the judge's replay reproduce the reference? If not, no verdict can be trusted."""

import itertools

from torch import nn

from harness import bounds
from harness.cases import Case, record, storages
from harness.compare import Tally, differs
from harness.errors import SelfTestError
from harness.nodes import called_nodes, pick_nodes
from harness.observe import observe
from harness.operators import is_real
from harness.replay import NATIVE, ROUNDED, Noise, Plan, replay
from harness.spent import spent
from harness.steps import steps
from harness.trees import same_bits
from harness.workload import Workload
from optimized.change import region_of

STEPS = 2  # a prefill and a decode
NOISE_RUNS = 8  # of each call; there are several calls of each region
LIMIT_BYTES = 256 << 20  # of the arguments of one call


@spent("self-test")
def self_test(reference: nn.Module, workload: Workload, seed: int) -> None:
    """Replay the nodes of every region, rounded everywhere, against the reference itself.

    They must agree bit for bit, or within self-noise where there are reductions, matrix products or
    transcendental functions. Raises SelfTestError naming the module and the rounding point.
    """
    fixed = storages(reference)
    groups = regions(reference)
    called = [called_nodes(reference, group, workload) for group in groups.values()]
    names = [n for group in called for n in pick_nodes(reference, group, seed, drawn=0)]
    inputs = itertools.islice(steps(workload, seed, sizes=False), STEPS)
    cases, _ = record(reference, names, inputs, LIMIT_BYTES)
    tallies: dict[str, Tally] = {}
    worst: dict[str, tuple[int, Case]] = {}
    varied: set[str] = set()
    for number, case in enumerate(cases):
        node = reference.get_submodule(case.node)
        try:
            first = replay(node, case.args, NATIVE, None, case.kwargs)
        except NotImplementedError as error:
            raise SelfTestError(f"the judge cannot replay {case.node}: {error}") from error
        _same_as_eager(node, case, fixed)
        rounded = replay(node, case.args, ROUNDED, first, case.kwargs).results
        runs = [
            replay(
                node,
                case.args,
                Plan(noise=Noise(seed=seed + number * NOISE_RUNS + i)),
                first,
                case.kwargs,
            )
            for i in range(NOISE_RUNS)
        ]
        for name, ours in first.results.items():
            if not is_real(ours.dtype):
                continue
            key = f"{region_of(node)}: {name}"
            tally = tallies.setdefault(key, Tally(key, "reduction"))
            loose = first.unspecified.get(name)
            keep = None if loose is None else ~loose
            wrong = tally.add(case.name, rounded[name], ours, keep)
            if wrong >= worst.get(key, (0, case))[0]:
                worst[key] = wrong, case
            for run in runs:
                # Against the replay, since the library's own kernels run in both others.
                where = f"{case.node}, {case.name}"
                tally.add_noise(where, run.results[name], rounded[name], keep)
                if run.varied:
                    varied.add(key)
    for key, tally in tallies.items():
        allowed = 0
        if key in varied:
            allowed = bounds.allowed(list(tally.noise.values()), tally.elements)
        if tally.differing > allowed:
            case = worst[key][1]
            point = _first_difference(reference.get_submodule(case.node), case)
            raise SelfTestError(
                f"the judge cannot replay {case.node} ({key}, {case.name}): {tally.differing} of "
                f"{tally.elements} elements differ from the reference, {allowed} allowed; "
                f"the first difference is at {point}"
            )


def regions(model: nn.Module) -> dict[str, list[str]]:
    """Nodes by region: modules whose class names a region, or leaf modules where none does."""
    named = [(n, m) for n, m in model.named_modules() if n]
    chosen = [(n, m) for n, m in named if hasattr(type(m), "region")]
    if not chosen:
        chosen = [(n, m) for n, m in named if not any(True for _ in m.children())]
    found: dict[str, list[str]] = {}
    for name, module in chosen:
        found.setdefault(region_of(module), []).append(name)
    return found


def _same_as_eager(node: nn.Module, case: Case, fixed: set[int]) -> None:
    """Run under the replay's dispatch, every operator as it is, against a plain call."""
    first = replay(node, case.args, NATIVE, None, case.kwargs)
    plain = observe(node, node, case, fixed)
    for name, ours in first.results.items():
        mine = plain.results.get(name, plain.arguments.get(name))
        assert mine is not None
        loose = first.unspecified.get(name)
        if loose is not None:
            ours, mine = ours.masked_fill(loose, 0), mine.masked_fill(loose, 0)
        if not same_bits(ours, mine):
            raise SelfTestError(
                f"{case.node} gives other bits under the judge's dispatch ({name}, {case.name}): "
                "the reference is not deterministic, or the judge misses one of its operators"
            )


def _first_difference(node: nn.Module, case: Case) -> str:
    """The first rounding point at which the two runs part."""
    first = replay(node, case.args, Plan(carry=None, name=True, record=True), None, case.kwargs)
    rounded = replay(node, case.args, Plan(name=True, record=True), first, case.kwargs)
    for point, a, b in zip(first.points, first.values, rounded.values, strict=False):
        wrong = int(differs(a, b, "reduction").sum()) if a.shape == b.shape else a.numel()
        if wrong > bounds.allowed([bounds.CaseNoise(a.numel(), [0, 0])], a.numel()):
            return f"`{point.name}` ({point.source}), where {wrong} of {a.numel()} differ"
    return "no rounding point: an operator between them"
