"""Work in several processes: the same results, and no silent end."""

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.errors import SelfTestError, UserError
from harness.executors.local import Local, Process
from harness.jobs import Pool, Task

START = functools.partial(contextlib.nullcontext, 5)


def add(number: int, state: int) -> int:
    return number + state


def kill(number: int, _state: int) -> None:
    signal.raise_signal(signal.Signals(number))


def leave(_state: int) -> None:
    os._exit(7)


def sleep(_state: int) -> None:
    time.sleep(600)


def refuse(_state: int) -> None:
    raise UserError("no such thing")


def fail_test(_state: int) -> None:
    raise SelfTestError("not reproduced")


def divide(state: int) -> float:
    return state / 0


@contextlib.contextmanager
def broken() -> Iterator[int]:
    os._exit(3)
    yield 0


def exit_codes(pool: Pool) -> list[int | None]:
    assert isinstance(pool.executor, Local)
    return [w.process.exitcode for w in pool.executor.team if isinstance(w, Process)]


def task(run: Callable[[int], Any], key: str = "", keep: Any = lambda result: None) -> Task:
    return Task("adds", key, run, keep)


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_is_run_once_and_may_add_others(jobs: int) -> None:
    found: list[int] = []
    with Pool(START, jobs) as pool:

        def keep(result: int) -> None:
            found.append(result)
            if result < 10:
                pool.add(task(functools.partial(add, result), "again", keep))

        for number in range(4):
            pool.add(task(functools.partial(add, number), str(number), keep))
        pool.run()
    assert sorted(found) == [5, 6, 7, 8, 10, 11, 12, 13]


def test_what_is_prepared_is_used_before_something_else_is() -> None:
    found: list[int] = []
    with Pool(START, 1) as pool:
        for number, key in enumerate("abcab"):
            pool.add(task(functools.partial(add, number), key, found.append))
        pool.run()
    assert [number - 5 for number in found] == [0, 3, 1, 4, 2]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (leave, "ended with exit status 7 while it adds"),
        (functools.partial(kill, signal.SIGKILL), "was killed by SIGKILL while it adds"),
    ],
    ids=["exits", "is-killed"],
)
def test_a_worker_that_ends_is_an_error_that_says_what_it_did(
    run: Callable[[int], Any], words: str
) -> None:
    with Pool(START, 2) as pool, pytest.raises(UserError, match=words):
        pool.add(task(run))
        pool.run()


def test_a_worker_that_does_not_start_is_an_error() -> None:
    with Pool(broken, 2) as pool, pytest.raises(UserError, match="exit status 3 while it starts"):
        pool.add(task(sleep))
        pool.run()


@pytest.mark.parametrize(
    ("run", "kind", "words"),
    [
        (refuse, UserError, "^no such thing$"),
        (fail_test, SelfTestError, "^not reproduced$"),
        (divide, RuntimeError, "failed while it adds:\n(?s:.*)ZeroDivisionError"),
    ],
    ids=["user", "self-test", "ours"],
)
def test_errors_come_through(run: Any, kind: type[Exception], words: str) -> None:
    with Pool(START, 2) as pool, pytest.raises(kind, match=words):
        pool.add(task(run))
        pool.run()


def test_ctrl_c_ends_all_workers() -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    pool = Pool(START, 2)
    with pytest.raises(KeyboardInterrupt), pool:
        pool.add(task(sleep), task(functools.partial(add, 1), "", interrupt))
        pool.run()
    assert exit_codes(pool) == [128 + signal.SIGTERM] * 2


@contextlib.contextmanager
def deaf(closes_s: float) -> Iterator[int]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield 5
    finally:
        time.sleep(closes_s)


def test_an_idle_worker_ends_though_it_hears_no_signal() -> None:
    """With CUDA in use, the signal may be another thread's."""
    with Pool(functools.partial(deaf, 0.0), 2) as pool:
        pool.executor.await_ready()
        pool.add(*(task(functools.partial(add, n), str(n)) for n in range(2)))
        pool.run()
        started = time.monotonic()
    assert time.monotonic() - started < 5.0
    assert exit_codes(pool) == [0, 0]


def test_workers_that_do_not_end_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs while it closes is killed; three of them cost no more time than one."""
    monkeypatch.setattr("harness.executors.local.JOIN_S", 1.0)
    with Pool(functools.partial(deaf, 600.0), 3) as pool:
        pool.executor.await_ready()
        pool.add(*(task(functools.partial(add, n), str(n)) for n in range(3)))
        pool.run()
        started = time.monotonic()
    assert time.monotonic() - started < 2.0
    assert exit_codes(pool) == [-signal.SIGKILL] * 3
