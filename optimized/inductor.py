"""Any region of any model compiled by Inductor, with every BF16 rounding of its equations kept.

torch.compile merges a rounding with the conversion after it unless told to emulate eager mode's;
that option also keeps products and sums from becoming fused multiply-adds.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from optimized.change import Change, Contract, Implementation, nodes
from optimized.compiled import compile_node

PREFIX = "inductor:"


@functools.cache
def numerics_options() -> dict[str, Any]:
    """Inductor's options for eager mode's rounding, as far as this PyTorch has them."""
    from torch._inductor import config

    options: dict[str, Any] = {"emulate_precision_casts": True}
    for name in (
        "eager_numerics.division_rounding",  # IEEE division; torch >= 2.12 calls it so
        "emulate_divison_rounding",  # sic; up to then
        "eager_numerics.disable_ftz",  # denormals stay
        "eager_numerics.use_pytorch_libdevice",  # exp, log, ... as eager mode computes them
    ):
        if name in config.get_config_copy():
            options[name] = True
    return options


def inductor_implementation(
    devices: tuple[str, ...] = ("cpu", "cuda"),
    guard: Callable[..., str | None] | None = None,
    prepare: Callable[[nn.Module, nn.Module], None] | None = None,
) -> Implementation:
    """The region as its reference says it, compiled; all nodes of a class share the graphs."""

    def build(node: nn.Module, knobs: Any) -> Callable[..., Any]:
        return compile_node(node, numerics_options())

    return Implementation(
        backend="inductor", devices=devices, build=build, guard=guard, prepare=prepare
    )


def inductor_change(region: str, contract: Contract | None = None) -> Change:
    """Compile `region`, whatever it is; without a contract of its own, it promises to keep every
    rounding and to differ by the order of its reductions only."""
    return Change(
        name=PREFIX + region,
        region=region,
        summary=f"{region} compiled by Inductor, roundings kept",
        contract=contract or Contract(numerics="reduction"),
        implementations=(inductor_implementation(),),
    )


def region_source(model: nn.Module, region: str) -> str | None:
    """The code Inductor generated so far for the nodes of `region` in `model`; None without any."""
    for name in nodes(model, region):
        compiled = getattr(model.get_submodule(name).forward, "region", None)
        if compiled is not None and compiled.sources:
            return "\n\n".join(compiled.sources)
    return None


def generated_source(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The code Inductor generated for `fn`, a function that `inductor_implementation` built.

    Calls `fn(*args)` if no graph exists yet, which may write to arguments as the region does.
    """
    compiled = getattr(fn, "region", None)
    if compiled is None:
        raise ValueError("fn is not a function that inductor_implementation built")
    if not compiled.sources:
        fn(*args)
    return "\n\n".join(compiled.sources)
