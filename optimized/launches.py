"""Who is told of each kernel launch and of the tensors that it is given; torch-free."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Observer = Callable[[Any, tuple[Any, ...]], AbstractContextManager[Any]]


class LibraryKernel:
    """A library's kernel that we launch past PyTorch's dispatcher, where an observer is told of it
    as of one of ours."""

    def __init__(self, name: str, *, library: str) -> None:
        self.__name__ = name
        self.library = library


# At most one: called with the kernel and its arguments, it returns what the launch runs in.
observers: list[Observer] = []


def observed(kernel: Any, arguments: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """What a launch of `kernel` with `arguments` runs in; nothing where nobody watches."""
    return observers[-1](kernel, arguments) if observers else nullcontext()
