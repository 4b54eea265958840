"""Library kernels for `prefill_attention` where the queries are the last T of S positions.

`cudnn` is cuDNN's attention, by its frontend's graph, causal at the lower right corner.
`flashinfer` is FlashAttention-3 in FlashInfer's batch prefill; to it a sequence of the cache is one
page. Both read keys and values where they are, once for each query head. They are held to our own
kernel's contract: exponentials to BF16 before their product with v, and one rounding of the output.
At the end of 98K positions 2048 queries of 8 sequences on a TP8 rank of Beam took an H200 8.3 ms
with cuDNN, 9.9 with FlashInfer, 10.2 with ours (2026-11-30). A run's tuning times them again: one
on an H200 chose cuDNN's, which was judged and kept (2026-12-01). Without a plan ours runs, for it
is there everywhere.

Without a mask every query sees its own position at least, so no result is left to a library's way
with a row that sees nothing.

A call's shapes are planned when they first come up. That waits for the device, and FlashInfer
compiles its kernel once for a machine; it cannot be in a CUDA graph. Later calls launch and nothing
else.
"""

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from optimized.gemv_engines import (
    OWN,
    CannotServe,
    check_among,
    first_line,
    not_in_a_graph,
    unusable,
)
from optimized.launches import LibraryKernel, observed

log = logging.getLogger(__name__)

LIBRARIES = {"cudnn": "cudnn", "flashinfer": "flashinfer.prefill"}
PACKAGES = {"cudnn": "nvidia-cudnn-frontend", "flashinfer": "flashinfer-python"}
ENGINES = (OWN, *LIBRARIES)
DIMS = 64, 128  # head dimensions that both libraries take on Hopper
HOPPER = 9  # major compute capability
CUDNN = LibraryKernel("sdpa", library="cuDNN")
FLASHINFER = LibraryKernel("batch_prefill_fa3", library="FlashInfer")
WORKSPACE = 16 << 20  # bytes; FlashInfer's FA3 needs them only to be there

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


@functools.cache
def missing(engine: str) -> str | None:
    """Why `engine` cannot run on this machine, or None; imports its library and runs it once."""
    if engine == OWN:
        return None
    if not torch.cuda.is_available():
        return "it needs a CUDA device"
    if torch.version.hip or torch.cuda.get_device_capability()[0] != HOPPER:
        return f"it is used on Hopper GPUs only, this is {torch.cuda.get_device_name()}"
    return unusable(LIBRARIES[engine], PACKAGES[engine], lambda: _try(engine))


def _try(engine: str) -> None:
    q, k = (torch.zeros(1, n, 1, 128, dtype=torch.bfloat16, device="cuda") for n in (64, 192))
    attend(engine, q, k, k, None, 1.0)
    torch.cuda.synchronize()


def takes(engine: str, shape: Mapping[str, int]) -> bool:
    """Whether `engine` serves calls of this shape: those without a mask, of two head dimensions."""
    return engine == OWN or not shape["masked"] and shape["d"] in DIMS


def offered(shape: Mapping[str, int]) -> tuple[str, ...]:
    """The engines that this machine has and that take the shape; ours is first."""
    return tuple(e for e in ENGINES if takes(e, shape) and missing(e) is None)


def check(engine: str) -> None:
    """ValueError in one line unless this machine has `engine`."""
    check_among(ENGINES, engine, missing)


def attend(
    engine: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """q [B, T, H, d], k, v [B, S, Hkv, d] BF16 views -> [B, T, H, d], causal at the end of S.

    ValueError where the engine does not take the call (a `mask`), or would have to plan it while a
    graph is captured; CannotServe where the library fails to.
    """
    if (reason := _refusal(engine, q, k, v, mask)) is not None:
        raise ValueError(f"engine {engine!r}: {reason}; take engine {OWN!r} for it")
    layouts = tuple((tuple(x.shape), x.stride()) for x in (q, k, v))
    return _planned(engine, q, layouts, scale)(q, k, v)


def _refusal(engine: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    if mask is not None:
        return "it takes no mask"
    if k.shape[1] < q.shape[1]:
        return f"{q.shape[1]} queries at the end of {k.shape[1]} positions, some see nothing"
    if q.shape[3] not in DIMS:
        return f"head dimension {q.shape[3]}, it takes {' or '.join(map(str, DIMS))}"
    if any(step % 8 for x in (k, v) for step in x.stride()[:3]):
        return f"k, v have strides {k.stride()}, {v.stride()}, it takes multiples of 8 elements"
    if any(x.data_ptr() % 16 for x in (q, k, v)):
        return "q, k or v is not 16-byte aligned"
    if engine == "flashinfer" and k.stride() != v.stride():
        return f"k, v have strides {k.stride()}, {v.stride()}, it takes equal ones"
    return None


_LOCK = threading.Lock()
_PLANS: dict[Any, Run] = {}


def _planned(engine: str, like: Tensor, layouts: Any, scale: float) -> Run:
    key = engine, like.device, layouts, scale
    if (found := _PLANS.get(key)) is not None:
        return found
    not_in_a_graph(engine)
    make, fails = (_cudnn, _cudnn_errors()) if engine == "cudnn" else (_flashinfer, RuntimeError)
    with _LOCK, torch.cuda.device_of(like):  # the tuner compiles in several threads
        if key not in _PLANS:
            try:
                _PLANS[key] = make(like.device, layouts, scale)
            except fails as error:
                text = f"engine {engine!r} cannot plan {layouts}: {first_line(error)}"
                log.warning("%s", text)
                raise CannotServe(text) from error
            torch.cuda.synchronize(like.device)  # later calls may come from other streams
        return _PLANS[key]


def _cudnn(device: torch.device, layouts: Any, scale: float) -> Run:
    import cudnn

    handle = _cudnn_handle(device)
    kind = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kind.BFLOAT16,
        intermediate_data_type=kind.FLOAT,
        compute_data_type=kind.FLOAT,
        handle=handle,
    )
    # cuDNN names dimensions [B, H, T, d], in whatever order they are in memory.
    turned = [tuple((x[0], x[2], x[1], x[3]) for x in layout) for layout in layouts]
    operands = [
        graph.tensor(name=name, dim=dims, stride=strides, data_type=kind.BFLOAT16)
        for name, (dims, strides) in zip("qkv", turned, strict=True)
    ]
    out, _ = graph.sdpa(
        *operands,
        attn_scale=scale,
        generate_stats=False,
        diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
        diagonal_band_right_bound=0,
        name="prefill_attention",
    )
    out.set_output(True).set_dim(turned[0][0]).set_stride(turned[0][1])
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = torch.empty_like(q)
        places = dict(zip((*operands, out), (q, k, v, result), strict=True))
        with _LOCK, torch.cuda.device_of(q):  # a handle has one stream at a time
            stream = torch.cuda.current_stream(device).cuda_stream
            cudnn.set_stream(handle=handle, stream=stream)
            with observed(CUDNN, (q, k, v, result)):
                graph.execute(places, workspace, handle=handle)
        return result

    return run


def _cudnn_errors() -> tuple[type[Exception], ...]:
    import cudnn

    return RuntimeError, cudnn.cudnnGraphNotSupportedError


@functools.cache
def _cudnn_handle(device: torch.device) -> Any:
    import cudnn

    return cudnn.create_handle()  # of the current device, which is this one


def _flashinfer(device: torch.device, layouts: Any, scale: float) -> Run:
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    (batch, steps, heads, dim), _ = layouts[0]
    (_, length, kv_heads, _), _ = layouts[1]
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "NHD", backend="fa3")
    sequences = torch.arange(batch + 1, dtype=torch.int32)
    wrapper.plan(
        sequences * steps,
        sequences,
        sequences[:-1].to(device),
        torch.full((batch,), length, dtype=torch.int32),
        heads,
        kv_heads,
        dim,
        length,
        causal=True,
        sm_scale=scale,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = torch.empty_like(q)
        with observed(FLASHINFER, (q, k, v, result)):
            wrapper.run(q.flatten(0, 1), (k, v), out=result.flatten(0, 1))
        return result

    return run


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
