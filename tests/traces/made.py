"""Traces made by hand, with figures that can be checked by hand."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.records import Ceilings
from traces.trace import Access, Call, Kernel, ModuleInfo, Outline, Trace

# 1 GB/s moves a byte in a nanosecond; 1 TFLOP/s computes a million operations in a microsecond.
CEILINGS = Ceilings(
    device_name="made up",
    read_gb_per_s=1.0,
    copy_gb_per_s=0.5,
    bf16_tflop_per_s=1.0,
    fp32_tflop_per_s=0.1,
    launch_us=1.0,
)


@dataclass(frozen=True, kw_only=True)
class Did:
    """One kernel: where, what it touched, and how long it took."""

    name: str
    call: int
    time_us: float = 10.0
    gap_us: float = 2.0
    reads: Sequence[Access] = ()
    writes: Sequence[Access] = ()
    flops: int = 0
    matmul: bool = False
    ambiguous: bool = False
    written: bool = False
    source: str | None = "model.py:1"


def trace(
    kernels: Sequence[Did],
    calls: Sequence[tuple[str, int | None]],
    *,
    given: Sequence[int] = (),
    outputs: Sequence[int] = (),
    layers: Sequence[str] = (),
    kinds: dict[str, str] | None = None,
    device: str = "cuda",
) -> Trace:
    """`calls` are (module, index of the call around it); a module's region is its last name."""
    total = sum(k.time_us + k.gap_us for k in kernels)
    modules = dict.fromkeys(["", *(module for module, _ in calls), *layers])
    clock, made = 0.0, []
    for k in kernels:
        clock += k.gap_us
        made.append(
            Kernel(
                name=k.name,
                op=k.name,
                call=k.call,
                source=k.source,
                start_us=clock,
                time_us=k.time_us,
                gap_us=k.gap_us,
                reads=tuple(k.reads),
                writes=tuple(k.writes),
                flops=k.flops,
                costed=True,
                matmul=k.matmul,
                peak="bf16" if k.matmul else "fp32",
                ambiguous=k.ambiguous,
                written=k.written,
            )
        )
        clock += k.time_us
    return Trace(
        device=device,
        mode="graph",
        steps=3,
        step_us=total,
        fastest_step_us=total,
        profiled_step_us=total,
        kernels=tuple(made),
        calls=tuple(Call(module=m, parent=p) for m, p in calls),
        given=tuple(given),
        outputs=tuple(outputs),
        outline=Outline(
            modules=tuple(
                ModuleInfo(
                    name=m,
                    cls=region(m) or "Model",
                    region=region(m),
                    kind=(kinds or {}).get(m),
                    source=None,
                )
                for m in modules
            ),
            layers=tuple(layers),
        ),
    )


def region(module: str) -> str | None:
    """A module's last name that is no index."""
    names = [part for part in module.split(".") if part and not part.isdigit()]
    return names[-1] if names else None
