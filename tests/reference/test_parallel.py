"""Tensor parallelism: the rank sum over a real process group, and shards that add up."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from reference import beam
from reference.beam import Beam, BeamConfig, RankSum
from tests.reference import small
from tests.reference.noise import assert_within, reorderings, undo

RANKS = 3
TP = 2  # what the toy shape divides by
ORDERINGS = 16
BIG = 2.0**25  # one more is lost in FP32
# Columns: a sum that BF16 holds, one that its one rounding brings to the even neighbour, and two
# whose result tells the order in which they were added.
PARTIALS = [[1.0, 256.0, 1.0, BIG], [2.0, 0.5, BIG, -BIG], [3.0, 0.5, -BIG, 1.0]]
SUMS = [6.0, 256.0, 0.0, 1.0]


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        rank_sum = RankSum(dist.group.WORLD)
        total = rank_sum(torch.tensor(PARTIALS[rank]).bfloat16())
        strided = rank_sum(random_partial(rank).T)
        torch.save((total, strided), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def random_partial(rank: int) -> Tensor:
    return torch.randn(64, 33, generator=torch.Generator().manual_seed(rank)).bfloat16()


def test_rank_sum_over_processes(tmp_path: Path) -> None:
    """FP32 sum of BF16 partials in rank order, rounded once, the same on every rank."""
    mp.get_context("forkserver").set_forkserver_preload(["torch", "reference.beam"])
    start: Any = mp.start_processes  # pyright: ignore[reportPrivateImportUsage]
    start(rank_main, (str(tmp_path),), nprocs=RANKS, start_method="forkserver")
    want = random_partial(0).float()
    for rank in range(1, RANKS):
        want = want + random_partial(rank).float()
    for rank in range(RANKS):
        total, strided = torch.load(tmp_path / f"{rank}.pt")
        assert total.dtype == torch.bfloat16
        assert total.tolist() == SUMS
        assert torch.equal(strided, want.bfloat16().T)


def test_rank_sum_without_a_group_is_the_identity() -> None:
    x = torch.randn(3)
    assert RankSum()(x) is x


def shard(state: dict[str, Tensor], c: BeamConfig, tp: int, rank: int) -> dict[str, Tensor]:
    """The weights that rank `rank` of `tp` holds: heads and widths split, the rest whole."""

    def cut(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(tp, dim)[rank]

    out = {}
    for name, tensor in state.items():
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if name.endswith("experts.gate_up_proj"):
            tensor = torch.cat([cut(half, 1) for half in tensor.chunk(2, dim=1)], dim=1)
        elif name.endswith("experts.down_proj"):
            tensor = cut(tensor, 2)
        elif leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_bias"):
            tensor = cut(tensor, 0)
        elif leaf in ("o_proj", "down_proj"):
            tensor = cut(tensor, 1)
        elif leaf in ("embed_tokens", "lm_head"):
            tensor = cut(tensor, 0)
        out[name] = tensor.contiguous()
    return out


def ranks(model: Beam, tp: int) -> list[Beam]:
    shards = []
    for rank in range(tp):
        part = beam.build(model.config.shard(tp), "cpu", 0)
        part.load_state_dict(shard(model.state_dict(), model.config, tp, rank))
        shards.append(part)
    return shards


def attention(model: Beam, layer: int, x: Tensor) -> Tensor:
    cache = beam.cache(model.config, x.shape[0], x.shape[1], "cpu")
    step = model.step(small.positions(x.shape[0], 0, x.shape[1]), cache)
    return model.model.layers[layer].self_attn(x, step, cache.layers[layer])


def mlp(model: Beam, layer: int, x: Tensor) -> Tensor:
    return model.model.layers[layer].mlp(x)


@pytest.mark.parametrize("layer", range(4), ids=["dense-sliding", "dense-full", "sliding", "full"])
@pytest.mark.parametrize("part", [attention, mlp])
def test_ranks_of_a_layer_add_up_to_the_whole(part, layer: int) -> None:
    model = small.build(torch.float32)
    x = torch.randn(2, 20, small.SMALL.hidden, generator=torch.Generator().manual_seed(0))
    total = sum(part(rank, layer, x) for rank in ranks(model, TP))
    whole = part(model, layer, x)
    reordered = (
        undo(part(m, layer, x[..., o]), o) for m, o in reorderings(model, model.config, ORDERINGS)
    )
    assert_within(total, whole, reordered)


def test_ranks_of_the_head_give_the_vocabulary_in_order() -> None:
    model = small.build(torch.float32)
    x = torch.randn(1, 3, small.SMALL.hidden, generator=torch.Generator().manual_seed(0))
    parts = torch.cat([rank.lm_head(x) for rank in ranks(model, TP)], dim=-1)
    reordered = (m.lm_head(x[..., o]) for m, o in reorderings(model, model.config, ORDERINGS))
    assert_within(parts, model.lm_head(x), reordered)
