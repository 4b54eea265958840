"""Calls that share memory, batches of one and of 128, sizes where a change decides otherwise."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.cases import Axes, activations, derive, storages
from harness.domains import judge_with_domain
from harness.records import Verdict
from harness.thresholds import crossings
from optimized.change import Change, Contract, Implementation, apply_change, share
from tests.harness.judged import case_of, mini, toy

ADD_NORM = Contract(numerics="reduction")


def add_norm(
    wrong: Callable[[Tensor, Tensor], bool],
    *,
    promises: bool = False,
    guard: Callable[..., str | None] | None = None,
    knobs: Any = None,
) -> Change:
    """The toy's add_norm, a little off where `wrong` says so."""

    def build(node: nn.Module, _: Any) -> Callable[..., Any]:
        def forward(x: Tensor, residual: Tensor) -> Any:
            residual, y = node(x, residual)
            return residual, y * (1 + 2**-7) if wrong(x, residual) else y

        return forward

    return Change(
        name="by-hand",
        region="add_norm",
        summary="the reference, or not",
        contract=replace(ADD_NORM, batch_invariant=promises),
        implementations=(
            Implementation(
                backend="torch",
                devices=("cpu",),
                build=build,
                guard=guard,
                knobs=knobs,
                shape=None if knobs is None else lambda node, x, residual: {"N": x.numel() // 64},
            ),
        ),
    )


def judged(change: Change) -> Verdict:
    tree = share(toy().model)
    apply_change(tree, change, "torch")
    return judge_with_domain(toy().model, tree, change, "torch", toy(), 1)


def test_what_is_wrong_where_arguments_share_memory_alone_is_refused() -> None:
    seen: list[bool] = []

    def build(node: nn.Module, _: Any) -> Callable[..., Any]:
        def forward(x: Tensor, residual: Tensor) -> Any:
            shared = x.untyped_storage().data_ptr() == residual.untyped_storage().data_ptr()
            seen.append(shared)
            summed, y = node(x, residual)
            return summed, y * (1 + 2**-7) if shared else y

        return forward

    honest = add_norm(lambda x, residual: False)
    (implementation,) = honest.implementations
    verdict = judged(replace(honest, implementations=(replace(implementation, build=build),)))
    assert not verdict.passed and any(seen)
    assert "arguments that share memory" in (verdict.reason or "")


def test_slices_of_a_packed_projection_stay_slices_in_fresh_copies() -> None:
    case = case_of("qk_norm_rope")
    node = mini().model.get_submodule(case.node)
    fixed = storages(mini().model)
    chosen = activations(node, case, fixed, {"k_cache", "v_cache"})
    found = derive(case, Axes({}, {}), chosen, torch.Generator().manual_seed(0))
    (shared,) = [c for c in found if c.name == "arguments that share memory"]
    q, k, v = shared.clones(fixed)[0][:3]
    assert q.untyped_storage()._cdata == k.untyped_storage()._cdata != 0
    assert k is v  # of one shape: the same tensor
    ours = shared.args[0]
    assert q.untyped_storage()._cdata != ours.untyped_storage()._cdata
    assert torch.equal(q, case.args[0]) and torch.equal(k, case.args[1])
    assert not q.is_contiguous() and q.stride() == ours.stride()


@pytest.mark.parametrize("promises", [True, False])
def test_a_batch_of_128_is_compared_with_one(promises: bool) -> None:
    verdict = judged(add_norm(lambda x, _: x.shape[0] == 128, promises=promises))
    assert verdict.passed != promises
    told = [n for n in verdict.notes if "of one sequence depend on the batch" in n]
    assert len(told) == 1 and "128 and 1)" in told[0]
    assert "batch-invariant at 3 and 1 sequences, unless noted" in verdict.notes
    if promises:
        assert told[0] in (verdict.reason or "")


class Tiles:
    """Launch knobs that change at 100 rows."""

    @classmethod
    def heuristic(cls, shape: dict[str, int]) -> int:
        return 1 if shape["N"] < 100 else 4


@pytest.mark.parametrize(
    ("wrong_at", "knobs", "sizes"),
    [
        (200, Tiles, "100"),
        (100, Tiles, "100"),
        (99, Tiles, "100"),
        (40, None, "41"),
        (41, None, ""),
    ],
)
def test_both_sides_of_each_threshold_are_judged(wrong_at: int, knobs: Any, sizes: str) -> None:
    def guard(node: nn.Module, x: Tensor, residual: Tensor) -> str | None:
        return "too many rows" if knobs is None and len(x) > 40 and x.shape[1] == 1 else None

    def wrong(x: Tensor, _: Tensor) -> bool:
        return x.shape[:2] == (wrong_at, 1)

    verdict = judged(add_norm(wrong, guard=guard, knobs=knobs))
    assert verdict.passed == (wrong_at in (200, 41))  # the reference runs at 41
    if not verdict.passed:
        assert f"{wrong_at} sequences" in (verdict.reason or "")
    around = "99, 100, 101" if knobs else "40, 41, 42"
    text = f"its guard or its knobs change at {sizes or 41} sequences: judged at {around}"
    assert text in verdict.notes


def test_thresholds_are_found_between_the_probes() -> None:
    def answer(n: int) -> str:
        return "declines" if n > 300 else "small" if n < 65 else "large"

    assert crossings(answer, 512) == [65, 301]
    assert crossings(answer, 200) == [65]
    assert crossings(lambda n: None, 512) == []
