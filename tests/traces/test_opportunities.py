"""Candidates: what can be saved, checked by hand; and that the ranking follows the trace alone."""

import pytest
import torch
from torch import Tensor

from tests.traces.made import CEILINGS, Did, trace
from tests.traces.toy_stack import Meld, tower
from traces.capture import capture
from traces.kernels import kernel_rows
from traces.opportunities import Opportunity, opportunities
from traces.trace import Trace


def found(t: Trace, call_us: float = 1.0) -> dict[str, Opportunity]:
    rows = kernel_rows(t, CEILINGS)
    return {o.region: o for o in opportunities(rows, CEILINGS, t.outline, call_us=call_us)}


def test_a_chain_saves_its_launches_and_the_tensors_between_them() -> None:
    """x (value 0) -> 1 -> 2 -> y (value 3), which is used outside."""
    t = trace(
        [
            Did(name="a", call=1, reads=[(0, 100)], writes=[(1, 400)]),
            Did(name="b", call=1, reads=[(1, 400)], writes=[(2, 400)]),
            Did(name="c", call=1, reads=[(2, 400)], writes=[(3, 100)]),
            Did(name="d", call=0, reads=[(3, 100)], writes=[(4, 100)]),
        ],
        [("", None), ("chain", 0)],
        given=[0],
        outputs=[4],
    )
    chain = found(t)["chain"]
    assert (chain.launches, chain.launches_saved, chain.node_count) == (3, 2, 1)
    assert chain.bytes_saved == 4 * 400
    assert (chain.time_us, chain.gap_us) == (30.0, 4.0)  # the gap before the first stays
    assert chain.floor_us == pytest.approx(0.2)  # 100 in, 100 out, at 1 GB/s
    assert chain.bound_us == pytest.approx(34.0 - 0.2)
    assert chain.predicted_us == pytest.approx(34.0 - 1.0 - 0.2)  # one launch and its bytes


def test_a_given_tensor_written_in_place_is_not_saved() -> None:
    t = trace(
        [
            Did(name="write", call=1, reads=[(0, 8)], writes=[(9, 8)]),
            Did(name="read", call=1, reads=[(9, 800)], writes=[(2, 8)]),
        ],
        [("", None), ("attend", 0)],
        given=[0, 9],
        outputs=[2],
    )
    assert found(t)["attend"].bytes_saved == 0


def test_products_of_one_input_become_one_and_chained_ones_stay_two() -> None:
    packed = trace(
        [
            Did(name="q", call=1, reads=[(0, 8), (1, 64)], writes=[(3, 8)], matmul=True),
            Did(name="k", call=1, reads=[(0, 8), (2, 64)], writes=[(4, 8)], matmul=True),
        ],
        [("", None), ("project", 0)],
        given=[0, 1, 2],
        outputs=[3, 4],
    )
    assert found(packed)["project"].launches_saved == 1
    chained = trace(
        [
            Did(name="up", call=1, reads=[(0, 8), (1, 64)], writes=[(3, 8)], matmul=True),
            Did(name="act", call=1, reads=[(3, 8)], writes=[(4, 8)]),
            Did(name="down", call=1, reads=[(4, 8), (2, 64)], writes=[(5, 8)], matmul=True),
        ],
        [("", None), ("mlp", 0)],
        given=[0, 1, 2],
        outputs=[5],
    )
    mlp = found(chained)["mlp"]
    assert mlp.launches_saved == 1
    assert mlp.bytes_saved == 16  # the product's own output, used by what is fused to it
    assert mlp.predicted_us == pytest.approx(36.0 - 2.0 - 20.0)  # gap before stays, products stay


def test_a_fused_call_that_costs_more_than_it_saves_is_a_loss() -> None:
    t = trace(
        [Did(name="a", call=1, time_us=3.0, reads=[(0, 8)], writes=[(1, 8)])],
        [("", None), ("small", 0)],
        given=[0],
        outputs=[1],
        device="cpu",
    )
    small = found(t, call_us=20.0)["small"]
    assert small.predicted_us == pytest.approx(3.0 - 20.0 - 0.016)
    assert small.launches_saved == 0


def test_nested_regions_are_both_listed_and_name_each_other() -> None:
    t = trace(
        [
            Did(name="a", call=1, reads=[(0, 8)], writes=[(1, 8)]),
            Did(name="b", call=2, reads=[(1, 8)], writes=[(2, 8)]),
        ],
        [("", None), ("layers.0.block", 0), ("layers.0.block.norm", 1)],
        given=[0],
        outputs=[2],
    )
    both = found(t)
    assert (both["block"].launches, both["norm"].launches) == (2, 1)
    assert (both["block"].contains, both["norm"].inside) == (("norm",), ("block",))


def test_predictions_leave_out_what_the_profiler_adds() -> None:
    kernels = [
        Did(name="a", call=1, reads=[(0, 8)], writes=[(1, 8)]),
        Did(name="b", call=1, reads=[(1, 8)], writes=[(2, 8)]),
    ]
    t = trace(kernels, [("", None), ("pair", 0)], given=[0], outputs=[2])
    halved = Trace(**{**vars(t), "fastest_step_us": t.step_us / 2})
    assert found(halved)["pair"].bound_us == pytest.approx(11.0 - 0.016)


def test_ambiguous_kernels_count_for_no_region() -> None:
    t = trace(
        [Did(name="a", call=1), Did(name="b", call=1, ambiguous=True)],
        [("", None), ("part", 0)],
    )
    assert found(t)["part"].launches == 1


class TenTimes(Meld):
    """The same region, ten times slower."""

    region = "meld"

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        for _ in range(9):
            super().forward(a, b)
        return super().forward(a, b)


def test_slowing_one_region_of_an_unknown_model_reorders_the_candidates() -> None:
    model, inputs = tower()
    before = ranked(model, inputs)
    for storey in model.storeys:
        storey.meld = TenTimes()  # type: ignore[union-attr]
    after = ranked(model, inputs)
    assert set(before) == set(after) == {"storey", "squash", "twins", "meld"}
    assert before.index("twins") < before.index("meld")
    assert after.index("meld") < after.index("twins")


def ranked(model: torch.nn.Module, inputs: tuple[Tensor, ...]) -> list[str]:
    rows = kernel_rows(capture(model, inputs), CEILINGS)
    return [o.region for o in opportunities(rows, CEILINGS, model, call_us=2.0)]
