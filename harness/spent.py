"""Where the time of a verdict goes: seconds by part, for whoever collects them. Torch-free."""

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

Seconds = dict[str, float]

_collected: ContextVar[Seconds | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[Seconds]:
    """While the context lasts, `spent` adds to what this gives."""
    found: Seconds = {}
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


@contextlib.contextmanager
def spent(part: str) -> Iterator[None]:
    """Count what is done here, or by the function that this decorates, as `part`.

    "region: noise" is a part of "region". Work that a card still does is counted where it is
    waited for.
    """
    found = _collected.get()
    started = time.perf_counter()
    try:
        yield
    finally:
        if found is not None:
            found[part] = found.get(part, 0.0) + time.perf_counter() - started


def rows(seconds: Seconds) -> list[tuple[str, float]]:
    """Each part with its own parts behind it, and what of it is in none of them as its rest."""
    found: list[tuple[str, float]] = []
    for name in (n for n in seconds if ": " not in n):
        inner = {n: s for n, s in seconds.items() if n.startswith(f"{name}: ")}
        found.append((name, seconds[name]))
        found += inner.items()
        if inner:
            found.append((f"{name}: rest", seconds[name] - sum(inner.values())))
    return found
