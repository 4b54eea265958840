"""Sizes by arithmetic: parameters, cache, shards, presets."""

from dataclasses import replace

import pytest
import torch

from reference import beam
from reference.beam import active_parameter_count, kv_bytes_per_token, parameter_count

GIB, BILLION = 1 << 30, 10**9
FULL = beam.configs["full"]


def test_full_model_equals_the_published_count() -> None:
    """Counted in both state dicts on the meta device: the same names, shapes and total."""
    oracle = pytest.importorskip("tests.reference.oracle")
    ours = beam.build(FULL, "meta", 0).state_dict()
    with torch.device("meta"):
        published = oracle.published_beam.BeamForCausalLM(oracle.transformers.BeamConfig())
    theirs = published.state_dict()
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    biases = sum(t.numel() for n, t in ours.items() if n.endswith("e_score_correction_bias"))
    parameters = sum(t.numel() for t in published.parameters())
    assert parameter_count(FULL) == parameters + biases
    assert biases == 49 * 256  # buffers there and here, counted as parameters by us


def test_published_defaults_are_our_full_preset() -> None:
    oracle = pytest.importorskip("tests.reference.oracle")
    mapped = oracle.published_config(FULL).to_dict()
    released = oracle.transformers.BeamConfig().to_dict()
    assert {n: v for n, v in mapped.items() if released.get(n) != v} == {}


@pytest.mark.parametrize("name", beam.configs)
def test_counts_by_arithmetic_are_those_of_the_modules(name: str) -> None:
    c = beam.configs[name]
    built = beam.build(c, "meta", 0).state_dict()
    assert parameter_count(c) == sum(t.numel() for t in built.values())


def test_full_model_is_501b_a23b() -> None:
    assert abs(parameter_count(FULL) - 501 * BILLION) < BILLION / 2
    assert abs(active_parameter_count(FULL) - 23 * BILLION) < BILLION / 2


def test_active_counts_only_the_chosen_experts() -> None:
    one_more = replace(FULL, top_k=9)
    expert = 3 * 5120 * 2560
    assert active_parameter_count(one_more) - active_parameter_count(FULL) == 49 * expert


def test_kv_bytes_per_token() -> None:
    assert kv_bytes_per_token(FULL) == 36 * 1024
    assert kv_bytes_per_token(replace(FULL, dtype=torch.float8_e4m3fn)) == 18 * 1024
    assert kv_bytes_per_token(beam.configs["tp8-rank"]) == 36 * 1024 // 8


def test_the_cache_grows_by_that_and_rings_stay() -> None:
    short, long = (beam.cache(FULL, 1, capacity, "meta") for capacity in (10_000, 1_000_000))
    assert long.nbytes - short.nbytes == 990_000 * kv_bytes_per_token(FULL)
    rings = [layer for layer in long.layers if layer.window is not None]
    assert len(rings) == 43
    assert {tuple(layer.k.shape) for layer in rings} == {(1, 512 + 1, 8, 128)}


def test_a_million_tokens_in_fp8_take_about_18_gib() -> None:
    cache = beam.cache(replace(FULL, dtype=torch.float8_e4m3fn), 1, 1 << 20, "meta")
    rings = 43 * 513 * 2 * 8 * 128
    assert cache.nbytes == 18 * GIB + 18 * 1024 + rings  # and a spare slot a layer


def test_shard_of_8() -> None:
    c = FULL.shard(8)
    assert (c.tp, c.query_heads, c.kv_heads) == (8, 6, 1)
    assert (c.expert_ff, c.dense_ff, c.vocabulary) == (320, 2560, 18992)
    same = "layers", "hidden", "head_dim", "experts", "top_k", "groups", "window"
    assert [getattr(c, n) for n in same] == [getattr(FULL, n) for n in same]
    assert FULL.shard(2).shard(4) == c


def test_shard_of_2() -> None:
    c = beam.configs["tp2-rank"]
    assert (c.tp, c.query_heads, c.kv_heads, c.expert_ff) == (2, 24, 4, 1280)


@pytest.mark.parametrize(
    ("tp", "what"), [(3, "kv_heads=8"), (16, "kv_heads=8"), (5, "query_heads=48")]
)
def test_a_shard_that_does_not_divide_is_refused(tp: int, what: str) -> None:
    with pytest.raises(ValueError, match=f"tp={tp} does not divide {what}"):
        FULL.shard(tp)


def weight_gib(name: str) -> float:
    return (
        sum(t.nbytes for t in beam.build(beam.configs[name], "meta", 0).state_dict().values()) / GIB
    )


def test_bytes_of_the_gpu_presets() -> None:
    """What decides whether they fit a 141 GB card (131 GiB), and how much is left for the cache."""
    assert round(weight_gib("tp8-rank"), 1) == 116.9  # 0.1 of it for FP32 routers
    assert round(weight_gib("tp2-rank"), 1) == 87.9
    cache = beam.cache(beam.configs["tp8-rank"], 1, 100_000, "meta")
    assert round(cache.nbytes / GIB, 2) == 0.44


def test_the_router_stays_fp32_in_every_preset() -> None:
    for c in beam.configs.values():
        state = beam.build(c, "meta", 0).state_dict()
        kinds = {t.dtype for n, t in state.items() if ".mlp.gate." in n}
        assert kinds == {torch.float32}
        assert {t.dtype for n, t in state.items() if ".mlp.gate." not in n} == {torch.bfloat16}
