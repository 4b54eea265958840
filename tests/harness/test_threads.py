"""Work side by side, and the streams it leaves behind."""

import io
import sys
import threading

import pytest

from harness.threads import side_by_side


def test_all_is_done_at_once() -> None:
    together = threading.Barrier(3, timeout=30)
    done: list[int] = []

    def work(item: int) -> None:
        together.wait()
        done.append(item)

    side_by_side(work, (1, 2, 3), threads=8)
    assert sorted(done) == [1, 2, 3]
    side_by_side(work, (), threads=8)
    assert len(done) == 3


def test_streams_that_threads_exchange_come_back() -> None:
    before = sys.stdout, sys.stderr
    entered = threading.Barrier(2, timeout=30)

    def compiles(_: int) -> None:
        mine = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        entered.wait()
        sys.stdout, sys.stderr = mine

    side_by_side(compiles, (1, 2), threads=2)
    assert (sys.stdout, sys.stderr) == before


def test_what_is_raised_comes_out_and_the_streams_come_back() -> None:
    before = sys.stdout

    def breaks(item: int) -> None:
        sys.stdout = io.StringIO()
        if item == 2:
            raise ValueError("the second")

    with pytest.raises(ValueError, match="the second"):
        side_by_side(breaks, (1, 2), threads=1)
    assert sys.stdout is before
