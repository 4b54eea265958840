"""Sizes by arithmetic: parameters, cache, shards, presets."""

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reference import muse_spark
from reference.muse_spark_config import (
    AudioConfig,
    active_parameter_count,
    kv_bytes_per_token,
    parameter_count,
)

GIB, BILLION = 1 << 30, 10**9
FULL = muse_spark.configs["full"]


def test_full_model_is_816b_a42b() -> None:
    """The active count with embedding and head, and without, which is the advertised one."""
    assert abs(parameter_count(FULL) - 816 * BILLION) < 8.16 * BILLION
    assert active_parameter_count(FULL) == 46_091_132_416
    assert active_parameter_count(FULL, ends=False) == 42_780_777_984
    assert FULL.note == (
        "822.0B parameters, a text token uses 46.1B, 42.8B of them not counting embedding and head"
    )


@pytest.mark.parametrize("name", muse_spark.configs)
def test_counts_by_arithmetic_are_those_of_the_modules(name: str) -> None:
    c = muse_spark.configs[name]
    built = muse_spark.build(c, "meta", 0).state_dict()
    assert parameter_count(c) == sum(t.numel() for t in built.values())


def test_published_defaults_are_our_full_preset() -> None:
    oracle = pytest.importorskip("tests.reference.muse_spark_oracle")
    mapped = oracle.published_config(FULL).to_dict()
    released = oracle.transformers.MuseSparkConfig().to_dict()
    parts = "text_config", "vision_config", "audio_config"
    for ours, theirs in [(mapped, released), *((mapped[p], released[p]) for p in parts)]:
        differ = {n: v for n, v in ours.items() if theirs.get(n) != v and n not in parts}
        assert differ == {}


def test_active_counts_only_the_chosen_experts() -> None:
    one_more = replace(FULL, top_k=9)
    expert = 3 * 4096 * 4096
    assert active_parameter_count(one_more) - active_parameter_count(FULL) == 62 * expert


def test_kinds_of_layers() -> None:
    """Counted back from the last: layers 1, 5, ..., 61 of the released model are full."""
    full = [i for i in range(FULL.layers) if FULL.is_full(i)]
    assert full == list(range(1, 62, 4))
    assert len(full) == 16
    kinds = {layer.kind for layer in muse_spark.build(FULL, "meta", 0).model.language_model.layers}
    assert kinds == {"full", "sliding"}


def test_kv_bytes_per_token() -> None:
    assert kv_bytes_per_token(FULL) == 16 * 2 * 16 * 64 * 2
    assert kv_bytes_per_token(muse_spark.configs["tp8-rank"]) == 9 * 2 * 2 * 64 * 2


def test_the_cache_grows_by_that_and_rings_stay() -> None:
    short, long = (muse_spark.cache(FULL, 1, capacity, "meta") for capacity in (10_000, 1_000_000))
    assert long.nbytes - short.nbytes == 990_000 * kv_bytes_per_token(FULL)
    rings = [layer for layer in long.layers if layer.window is not None]
    assert len(rings) == 46
    assert {tuple(layer.k.shape) for layer in rings} == {(1, 2048 + 1, 16, 64)}


CARD = 139 * GIB  # of an H200, as PyTorch sees it
REST = 2 * GIB  # CUDA itself, libraries' workspaces, captured graphs


class Peak(TorchDispatchMode):
    """The most bytes that a step's own tensors take at once."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.given = {t.untyped_storage()._cdata for t in given}
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.given and key not in self.live:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key)
        self.most = max(self.most, sum(self.live.values()))
        return made


def prefill_bytes(c: muse_spark.MuseSparkConfig) -> int:
    """What a prefill 8 x 2048 at 100K makes, on the meta device, whose attention makes its result
    alone, as a GPU's kernel does."""
    model, cache = muse_spark.build(c, "meta", 0), muse_spark.cache(c, 8, 100_000, "meta")
    for layer in model.model.language_model.layers:
        attend: Any = layer.self_attn.prefill_attend  # pyright: ignore
        attend.forward = lambda q, k, v, mask: torch.empty_like(q)
    ids = torch.zeros(8, 2048, dtype=torch.int64, device="meta")
    cache.ends_aligned = True
    kept = [t for layer in cache.layers for t in (layer.k, layer.v)]
    with torch.no_grad(), Peak([*model.state_dict().values(), *kept]) as peak:
        model(ids, ids, cache)
    return peak.most


def test_one_rank_of_eight_fits_a_card_and_one_layer_more_does_not() -> None:
    """Weights, the caches of a decode and a prefill, and what a judged prefill makes, twice."""
    c = muse_spark.configs["tp8-rank"]
    assert (c.tp, c.query_heads, c.kv_heads, c.expert_ff, c.vocabulary) == (8, 16, 2, 512, 25256)
    assert (c.layers, sum(c.is_full(i) for i in range(c.layers))) == (36, 9)
    same = "hidden", "head_dim", "experts", "expert_width", "top_k", "window"
    assert [getattr(c, n) for n in same] == [getattr(FULL, n) for n in same]
    assert c.note == (
        "what one of 8 tensor-parallel ranks holds and computes, sums over ranks the identity; "
        "36 of 62 layers"
    )
    assert muse_spark.configs["mini"].note == ""

    def needs(layers: int) -> tuple[int, int]:
        other = replace(c, layers=layers)
        state = muse_spark.build(other, "meta", 0).state_dict().values()
        caches = (muse_spark.cache(other, batch, 100_000, "meta").nbytes for batch in (1, 8))
        return sum(t.nbytes for t in state), sum(caches)

    makes = prefill_bytes(replace(c, layers=2))
    weights, caches = needs(c.layers)
    assert [round(n / GIB, 1) for n in (weights, caches, makes)] == [111.4, 4.1, 10.5]
    assert round(needs(62)[0] / GIB, 1) == 191.4
    assert weights + caches + 2 * makes + REST < CARD < sum(needs(c.layers + 1)) + 2 * makes + REST


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (8, 2048)], ids=["decode", "prefill"])
def test_one_rank_runs_the_timed_steps(batch: int, tokens: int) -> None:
    """Shapes alone, on the meta device: 100K positions, ends aligned, the library's prefill."""
    c = replace(muse_spark.configs["tp8-rank"], layers=5)
    cache = muse_spark.cache(c, batch, 100_000, "meta")
    cache.ends_aligned = True
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
    logits = muse_spark.build(c, "meta", 0)(ids, ids, cache)
    assert logits.shape == (batch, 1, 202_048 // 8)
    assert logits.dtype == torch.bfloat16


@pytest.mark.parametrize("tp", [3, 5, 32])
def test_a_shard_that_does_not_divide_is_refused(tp: int) -> None:
    with pytest.raises(ValueError, match=f"tp={tp} does not divide"):
        FULL.shard(tp)


def test_a_shard_is_not_sharded_again() -> None:
    with pytest.raises(ValueError, match="tp=2 is a shard already"):
        FULL.shard(2).shard(4)


@pytest.mark.parametrize("name", muse_spark.configs)
def test_router_and_gates_are_fp32_and_the_rest_is_not(name: str) -> None:
    state = muse_spark.build(muse_spark.configs[name], "meta", 0).state_dict()
    wide = ".mlp.gate.", "residual_gate.gate"
    kinds = {t.dtype for n, t in state.items() if any(w in n for w in wide)}
    assert kinds == {torch.float32}
    others = {t.dtype for n, t in state.items() if not any(w in n for w in wide)}
    assert others == {torch.bfloat16}


def test_an_audio_token_is_80_ms_at_24_khz() -> None:
    assert AudioConfig().samples_per_token == 1920
