"""Mutants: wrong variants of a region, derived from its rounding points and operators.

Nothing is written by hand for a model. Each interior rounding point gives one mutant that leaves
it out, one for each module that leaves it out there alone, where several read it, and one that
moves it; each operator those of `harness.mutations` and `harness.precision`;
`harness.misuse` adds those around the operators.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.cases import Case
from harness.examine import NAMED
from harness.misuse import (
    OUTPUTS,
    Build,
    Keyed,
    Mutant,
    computes,
    of_arguments,
    of_attributes,
    of_constructor,
)
from harness.mutate import Call, Key, Wrong, forget, trace
from harness.mutations import SLIPS, in_bf16
from harness.precision import PRECISION, REORDERED
from harness.region import RegionCases
from harness.replay import Point, replay
from harness.trees import map_tensors


def derive_mutants(cases: RegionCases) -> list[Mutant]:
    """All mutants of the region, from the recorded calls of its nodes, in the operators' order."""
    numerics = cases.measured.contract.numerics
    words = {numerics} if isinstance(numerics, str) else set(numerics.values())
    found: dict[tuple[Any, ...], Mutant] = {}
    fixed = cases.measured.fixed
    for case in cases.recorded:
        node = cases.reference.get_submodule(case.node)
        args, kwargs = case.clones(fixed)
        calls = trace(node, args, kwargs)
        own = [c for c in calls if not _in_region(node, c.module)]
        made = [*_of_points(node, case, calls), *_of_operators(own)]
        sizes = [*of_constructor(node), *of_attributes(node)]
        made += [*of_arguments(node, case, fixed), *OUTPUTS]
        made += [(k, m) for k, m in sizes if k in found or computes(m, node, case, fixed)]
        forget(calls)
        for key, mutant in made:
            if mutant.kind != REORDERED or words == {"exact"}:
                found.setdefault(key, mutant)
    return list(found.values())


def _in_region(node: nn.Module, module: str) -> bool:
    """Whether a module below the node is, or is in, a named region of its own, where its operators
    are judged more sharply."""
    parts = module.split(".") if module else []
    above = (".".join(parts[: n + 1]) for n in range(len(parts)))
    return any(hasattr(type(node.get_submodule(name)), "region") for name in above)


def _of_points(node: nn.Module, case: Case, calls: list[Call]) -> Keyed:
    """Each interior rounding point left out, and moved."""
    points = replay(node, case.args, NAMED, None, case.kwargs).points
    for point, call in pair_points(points, calls):
        if not point.interior:
            continue
        about = {"point": point.name, "operator": point.operator, "source": point.source}
        key = call.key
        yield (
            ("dropped", point.name),
            Mutant(
                kind="rounding dropped",
                what="FP32 goes to what uses it",
                build=lambda node, key=key: Wrong(node, {}, key),
                **about,
            ),
        )
        for use, reader in zip(point.uses, point.readers, strict=True):
            build = functools.partial(_dropped_in, key, reader)
            what = f"FP32 goes to {reader} alone"
            about_use = {**about, "point": use.name}
            yield (
                ("dropped", use.name),
                Mutant(kind="rounding dropped", what=what, build=build, **about_use),
            )
        early = _earlier(call)
        if early is None:
            what, build = "after what uses it", _moved_late(key)
        else:
            what, build = f"before {early.called}", _moved_early(key, early)
        yield (
            ("moved", point.name),
            Mutant(kind="rounding moved", what=what, build=build, **about),
        )


def pair_points(points: Sequence[Point], calls: list[Call]) -> list[tuple[Point, Call]]:
    """Each rounding point with the traced operator that makes it: the n-th of its expression."""
    rounding: dict[str, list[Call]] = {}
    for call in calls:
        if call.rounds:
            rounding.setdefault(call.key.label, []).append(call)
    used: dict[str, int] = {}
    pairs = []
    for point in points:
        label = point.name.rpartition(" #")[0] or point.name
        if label not in rounding:
            label = point.name
        n = used.get(label, 0)
        used[label] = n + 1
        if n >= len(rounding.get(label, ())):
            raise RuntimeError(f"no operator makes the rounding point {point.name!r}")
        pairs.append((point, rounding[label][n]))
    return pairs


def _earlier(call: Call) -> Key | None:
    """The operator before whose operands the rounding may go instead: the rounding's own, or the
    one whose result it converts; None where nothing there is wider than the rounded dtype."""
    results = [u.result for u in call.users]
    if any(isinstance(r, Tensor) and r.dtype == torch.float32 for r in results):
        return None  # an FP32 result follows, where the rounding can go
    where = call
    if call.key.called == "_to_copy" and call.makers:
        where = call.makers[0]  # what computed it; views of that follow
    for operand in where.args:
        if isinstance(operand, Tensor) and operand.dtype == torch.float32:
            if not torch.equal(in_bf16(operand), operand):
                return where.key
        elif isinstance(operand, float) and in_bf16(operand) != operand:
            return where.key
    return None


def _dropped_in(key: Key, reader: str, node: nn.Module) -> Wrong:
    return Wrong(node, {}, key, reader=reader)


def _moved_late(key: Key) -> Build:
    return lambda node: Wrong(node, {}, key, late=True)


def _moved_early(key: Key, early: Key) -> Build:
    def rounded(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*map_tensors(in_bf16, tuple(map(in_bf16, args))), **kwargs)

    return lambda node: Wrong(node, {early: rounded}, key)


def _of_operators(calls: list[Call]) -> Keyed:
    """What can go wrong at each operator: at the first and the last of those in one place."""
    last: dict[tuple[str, str], int] = {}
    for call in calls:
        last[call.key.label, call.key.called] = call.key.nth
    for call in calls:
        if call.key.nth not in (0, last[call.key.label, call.key.called]):
            continue
        for slip in (*SLIPS, *PRECISION):
            for kind, what, alteration in slip(call):
                yield (
                    (kind, what.partition(" becomes")[0], *call.key),
                    Mutant(
                        kind=kind,
                        what=what,
                        point=call.key.label,
                        operator=call.key.called,
                        source=call.source,
                        build=lambda node, key=call.key, alteration=alteration: Wrong(
                            node, {key: alteration}
                        ),
                    ),
                )
