"""Shards that add up: what ranks hold and compute of a layer, summed, is the whole."""

import pytest
import torch
from torch import Tensor

from reference import muse_spark
from reference.muse_spark import MuseSpark
from reference.parallel import RankSum
from tests.reference import muse_spark_toy as toy
from tests.reference import small
from tests.reference.muse_spark_toy import SMALL, reorderings
from tests.reference.noise import assert_within, undo

TP = 2
ORDERINGS = 16
FP32 = torch.float32


def shard(state: dict[str, Tensor], tp: int, rank: int) -> dict[str, Tensor]:
    """The weights of rank `rank` of `tp`: heads, inner widths, vocabulary and the inputs of pooler
    and unpooler split, the rest whole."""
    rows = "q_proj", "k_proj", "v_proj", "gate_proj", "embed_tokens", "lm_head"
    columns = "o_proj", "pre_expert_proj", "post_expert_proj"
    out = {}
    for name, tensor in state.items():
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if leaf == "gate_up_proj":
            tensor = torch.cat([half.chunk(tp, 1)[rank] for half in tensor.chunk(2, 1)], dim=1)
        elif leaf == "down_proj":
            tensor = tensor.chunk(tp, 2)[rank]
        elif leaf in rows:
            tensor = tensor.chunk(tp, 0)[rank]
        elif leaf in columns:
            tensor = tensor.chunk(tp, 1)[rank]
        out[name] = tensor.contiguous()
    return out


def ranks(model: MuseSpark) -> list[MuseSpark]:
    shards = []
    for rank in range(TP):
        part = muse_spark.build(model.config.shard(TP, rank), "cpu", 0)
        part.load_state_dict(shard(model.state_dict(), TP, rank))
        shards.append(part)
    return shards


@pytest.mark.parametrize("i", [0, 1], ids=["sliding", "full"])
def test_ranks_of_attention_add_up(i: int) -> None:
    model = toy.build(FP32)
    x = torch.randn(2, 20, SMALL.hidden, generator=torch.Generator().manual_seed(0))

    def run(m: MuseSpark, x: Tensor) -> Tensor:
        cache = muse_spark.cache(m.config, 2, 20, "cpu")
        step = m.step(small.positions(2, 0, 20), cache)
        return m.model.language_model.layers[i].self_attn(x, step, cache.layers[i])

    total = sum(run(rank, x) for rank in ranks(model))
    reordered = (undo(run(m, x[..., o]), o) for m, o in reorderings(model, model.config, ORDERINGS))
    assert_within(total, run(model, x), reordered)


def exchange(parts: list[MuseSpark], x: Tensor) -> Tensor:
    """The ranks' experts, a sum of the ranks at each of the three places where they meet."""
    moes = [part.model.language_model.layers[0].mlp for part in parts]
    order = moes[0].pool.rank_sum, moes[0].experts.rank_sum, moes[0].rank_sum
    assert all(isinstance(place, RankSum) for place in order)
    totals: list[Tensor] = []
    for stage in range(len(order)):
        partials: list[Tensor] = []
        for moe in moes:
            places = moe.pool.rank_sum, moe.experts.rank_sum, moe.rank_sum
            hooks = [
                place.register_forward_hook(lambda *_, t=total: t)
                for place, total in zip(places, totals, strict=False)
            ]
            seen = lambda _, args, p=partials: p.append(args[0])  # noqa: E731
            hooks.append(places[stage].register_forward_pre_hook(seen))
            moe(x)
            for hook in hooks:
                hook.remove()
        totals.append(torch.stack(partials).sum(0))
    return totals[-1].view_as(x)


def test_ranks_of_the_experts_meet_three_times() -> None:
    """Before the pooler's norm, before the experts' output norm, after the unpooler."""
    model = toy.build(FP32)
    x = torch.randn(2, 20, SMALL.hidden, generator=torch.Generator().manual_seed(0))
    run = lambda m, x: m.model.language_model.layers[0].mlp(x)  # noqa: E731
    reordered = (undo(run(m, x[..., o]), o) for m, o in reorderings(model, model.config, ORDERINGS))
    assert_within(exchange(ranks(model), x), run(model, x), reordered)


def test_ranks_of_the_head_give_the_vocabulary_in_order() -> None:
    model = toy.build(FP32)
    x = torch.randn(1, 3, SMALL.hidden, generator=torch.Generator().manual_seed(0))
    parts = torch.cat([rank.lm_head(x) for rank in ranks(model)], dim=-1)
    reordered = (m.lm_head(x[..., o]) for m, o in reorderings(model, model.config, ORDERINGS))
    assert_within(parts, model.lm_head(x), reordered)
