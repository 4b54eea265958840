"""How many kernels a layer of Muse Spark launches in a decode, with the catalogue applied."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from optimized import attention_step, launches
from optimized.catalog import for_model
from optimized.change import apply_change, nodes, reached, share
from reference import muse_spark
from reference.cache import KVCache
from tests.optimized.kernel_checks import DEVICE, INTERPRETED, needs_kernels
from tests.reference import muse_spark_toy as toy

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(DEVICE == "cuda" and not INTERPRETED, reason="the toy is built on the CPU"),
]
MOST = 16
CONTEXT = 200  # two shares, one of a window
SIZES = {"layers": 2, "hidden": 64, "vocabulary": 40, "window": 8, "experts": 4, "top_k": 2}
SIZES |= {"query_heads": 2, "kv_heads": 1, "expert_width": 32, "expert_ff": 16}


class Launches(TorchDispatchMode):
    """Names of kernels: Triton's, and PyTorch's operators that make or write a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or "empty" in name or name == "_unsafe_view"):
            self.names.append(f"aten::{name}")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def triton(self, kernel: Any, arguments: Any) -> Iterator[None]:
        self.names.append(kernel.fn.__name__.removesuffix("_kernel"))
        with _disable_current_modes():  # the interpreter runs operators of its own
            yield


def launched(model: nn.Module, cache: KVCache) -> dict[str, list[str]]:
    """What the last layer of each kind launches in a decode step."""
    found: dict[str, list[str]] = {}
    seen = Launches()
    for layer in model.model.language_model.layers:  # pyright: ignore
        start: list[int] = []
        layer.register_forward_pre_hook(lambda *_, s=start: s.append(len(seen.names)))
        layer.register_forward_hook(
            lambda m, *_, s=start: found.update({m.kind: seen.names[s[-1] :]})
        )
    launches.observers.append(seen.triton)
    try:
        position = torch.full((1, 1), CONTEXT - 1)
        with torch.no_grad(), seen, np.errstate(over="ignore", invalid="ignore"):
            model(torch.zeros(1, 1, dtype=torch.int64), position, cache)
    finally:
        launches.observers.remove(seen.triton)
    return found


def optimised(*, around: tuple[str, ...]) -> nn.Module:
    """All changes of parts, then those around parts that are named."""
    model = share(toy.build(torch.bfloat16, **SIZES))
    every = for_model(model, "cuda")
    found = [c for c, i in every if i.backend == "triton" and not c.around]
    found += [c for name in around for c, i in every if c.name == name and i.backend == "triton"]
    for change in found:
        if reached(model, nodes(model, change.region)):
            apply_change(model, change, "triton")
    return model


def cache() -> KVCache:
    config = toy.build(torch.bfloat16, **SIZES).config
    return muse_spark.cache(config, 1, CONTEXT, "cpu")


ATTENTION = ["gemv", "step_attention", "combine_gate", "gemv"]
WINDOW = ["gemv", "step_attention", "gated_projection"]
CROSSED = ["residual_boundary"]
EXPERTS = ["choose_norm", "experts_up", "pair_product", "norm_combine", "gemv"]
WHOLE = [*CROSSED, "route_pool", *EXPERTS, *CROSSED]
ROUTED = ["boundary_router", "gemv", *EXPERTS, *CROSSED]
PARTS = ["gemv", "qk_norm", "decode_attention", "combine_splits", "output_norm_gate", "gemv"]
PARTS += [*CROSSED, "router_logits", "router_choose", "gemv", "row_norm"]
PARTS += ["experts_up", "pair_product", "norm_combine", "gemv", *CROSSED]


@pytest.mark.parametrize(
    ("around", "full", "sliding"),
    [
        ((), PARTS, [n for n in PARTS if n != "combine_splits"]),
        (("attention_step", "latent_moe"), ATTENTION + WHOLE, WINDOW + WHOLE),
        (
            ("attention_step", "latent_moe", "gated_boundary_router"),
            ATTENTION + ROUTED,
            WINDOW + ROUTED,
        ),
    ],
    ids=["parts", "whole", "with-the-router"],
)
def test_a_layer_launches_at_most_sixteen(around, full, sliding, monkeypatch):
    """Nothing of the reference is left in a layer. Two shares stand for the many of a long context,
    which no block of the output projection combines for itself."""
    monkeypatch.setattr(attention_step, "MAX_FUSED_SPLITS", 1)
    found = launched(optimised(around=around), cache())
    assert found == {"full": full, "sliding": sliding}
    assert all(len(names) <= MOST for names in found.values())


def test_the_reference_launches_many():
    found = launched(share(toy.build(torch.bfloat16, **SIZES)), cache())
    assert all(len(names) > 5 * MOST for names in found.values())
