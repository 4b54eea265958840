"""Calls made side by side, of libraries that compile for as long as a minute each."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def side_by_side(work: Callable[[T], object], items: Sequence[T], threads: int) -> None:
    """Do `work` on each of `items`, in `threads` threads; raises what the first of them raises.

    CuTe DSL puts another stdout and stderr in place while it compiles. Of two threads one may put
    the other's back, for good: so the streams are again what they were.
    """
    if not items:
        return
    streams = sys.stdout, sys.stderr
    try:
        with ThreadPoolExecutor(min(len(items), threads)) as pool:
            list(pool.map(work, items))
    finally:
        sys.stdout, sys.stderr = streams
