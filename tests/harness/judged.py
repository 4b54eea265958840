"""What the judge's tests share: workloads, recorded calls, and changes written by hand."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.cases import Case, record
from harness.judge import judge_region
from harness.records import Verdict
from harness.region import RegionCases
from harness.steps import steps
from harness.workload import Workload
from optimized.change import Change, Contract, Implementation, apply_change, nodes, region_of, share

TOY = str(Path(__file__).with_name("toy_model.py"))
LIMIT_BYTES = 1 << 28


@functools.cache
def mini() -> Workload:
    return Workload.load("beam", "mini", "cpu")


@functools.cache
def toy() -> Workload:
    return Workload.load(TOY, "toy", "cpu")


@functools.cache
def regions() -> dict[str, list[str]]:
    """Mini's named regions and their nodes."""
    found: dict[str, list[str]] = {}
    for name, module in mini().model.named_modules():
        if hasattr(type(module), "region"):
            found.setdefault(region_of(module), []).append(name)
    return found


@functools.cache
def recorded() -> list[Case]:
    """Calls of the first and the last node of every region of mini, from five steps."""
    names = [name for group in regions().values() for name in {group[0], group[-1]}]
    return record(mini().model, names, steps(mini(), 0, sizes=False), LIMIT_BYTES)[0]


def case_of(region: str, step: str = "ragged prefill") -> Case:
    first = nodes(mini().model, region)[0]
    return next(c for c in recorded() if c.node == first and c.name == step)


def change(
    region: str, build: Callable[[nn.Module], Callable[..., Any]], contract: Contract | None = None
) -> Change:
    implementation = Implementation(
        backend="torch", devices=("cpu",), build=lambda node, _knobs: build(node)
    )
    return Change(
        name=getattr(build, "__name__", "change"),
        region=region,
        summary="written by hand",
        contract=contract or Contract(numerics="reduction"),
        implementations=(implementation,),
    )


def changed(workload: Workload, made: Change) -> nn.Module:
    """A second tree over the workload's parameters with the change applied."""
    candidate = share(workload.model)
    apply_change(candidate, made, "torch")
    return candidate


prepared: dict[tuple[Any, ...], tuple[Workload, RegionCases]] = {}


def judged(
    workload: Workload, made: Change, seed: int = 1, *, alone: bool = False, **options: Any
) -> Verdict:
    """The verdict on a change. What depends on the reference and the contract alone is prepared
    once for all tests of a process, or, for a verdict `alone`, as `judge_region` does."""
    candidate = changed(workload, made)
    if alone:
        return judge_region(workload.model, candidate, made, "torch", workload, seed, **options)
    key = id(workload), made.region, repr(made.contract), seed, repr(options)
    if key not in prepared:
        given = workload.model, made.region, made.contract, workload, seed
        prepared[key] = workload, RegionCases.prepare(*given, **options)
    return prepared[key][1].judge(candidate, "torch")


def normed(x: Tensor, weight: Tensor, eps: float, order: Tensor | None = None) -> Tensor:
    """RMSNorm without its rounding, the sum of squares optionally in another order."""
    x = x.float()
    squares = x.square() if order is None else x.square()[..., order]
    return x * torch.rsqrt(squares.mean(-1, keepdim=True) + eps) * weight.float()
