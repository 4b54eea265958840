"""What each kernel of a module call moves and computes, where the call's interior is not seen.

The call's footprint says how many bytes of each value cross its border; a launch says which values
its kernel is given. A kernel reads and writes what it is given, at most as much as the call does:
of gathered weights the rows that are used. A value given to several kernels counts in full for
each, also where the L2 cache holds it: bytes here are what a kernel asks for, as they are for
PyTorch's operators. What never leaves the call is written in full by the first kernel that is given
it, and read in full by the others.

The arguments of a library's or a compiler's kernels are not known: what no other kernel is given is
spread over them by their time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from traces.observed import Work


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kernel of a call, in launch order."""

    time_us: float
    given: Mapping[int, int] | None  # bytes of each value that it is given; None: not known


def split(work: Work, parts: Sequence[Part]) -> list[Work | None]:
    """The part of `work` that each kernel does; None where nothing is left for a kernel whose
    arguments are not known."""
    if len(parts) == 1:
        return [work]
    unknown = [i for i, part in enumerate(parts) if part.given is None]
    claimed = {value for part in parts for value in part.given or ()}
    reads, writes = dict(work.reads), dict(work.writes)
    left = [v for v in (*reads, *writes) if v not in claimed]
    shares = _by_time(parts, unknown)
    flops, products = _operations(work, parts, unknown)
    made: set[int] = set()
    found: list[Work | None] = []
    for i, part in enumerate(parts):
        if part.given is None and not left and not products[i]:
            found.append(None)
            continue
        own: Mapping[int, int] = part.given or {}
        inside = {v: n for v, n in own.items() if v not in work.known}
        read = {v: min(n, own[v]) for v, n in reads.items() if v in own}
        written = {v: min(n, own[v]) for v, n in writes.items() if v in own}
        read |= {v: n for v, n in inside.items() if v in made}
        written |= {v: n for v, n in inside.items() if v not in made}
        made |= inside.keys()
        if part.given is None:
            read |= {v: round(n * shares[i]) for v, n in reads.items() if v not in claimed}
            written |= {v: round(n * shares[i]) for v, n in writes.items() if v not in claimed}
        found.append(
            replace(
                work,
                reads=tuple(read.items()),
                writes=tuple(written.items()),
                flops=round(flops[i] + products[i]),
                matmul=products[i] > 0,
            )
        )
    return found


def _by_time(parts: Sequence[Part], among: Sequence[int]) -> dict[int, float]:
    """A share of 1 for each of `among`, in proportion to their times."""
    total = sum(parts[i].time_us for i in among)
    return {i: parts[i].time_us / total if total else 1 / len(among) for i in among}


def _operations(
    work: Work, parts: Sequence[Part], unknown: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Each kernel's operations that are no products, by time, and those that are: a product is
    the kernel's that is given the most of what enters it, or several such kernels' by time."""
    everyone = range(len(parts))
    products = [0.0] * len(parts)
    for values, flops in work.products:
        counts = [len(values & (part.given or {}).keys()) for part in parts]
        best = max(counts)
        doers = [i for i in everyone if counts[i] == best] if best else unknown or everyone
        for i, share in _by_time(parts, doers).items():
            products[i] += flops * share
    rest = work.flops - sum(flops for _, flops in work.products)
    shares = _by_time(parts, everyone)
    return [rest * shares[i] for i in everyone], products
