"""What a rounding is called: the module, the expression and the source line that made it.

The name comes from the running frames, so a model needs no annotation: the innermost method of a
module on the stack, and the text of the expression it was evaluating.
"""

import ast
import functools
import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

HARNESS = str(Path(__file__).parent)
ROOT = Path(__file__).parent.parent
SKIPPED = str(Path(torch.__file__).parent), HARNESS
ENTRIES = "replay", "trace", "run_altered"  # functions of the harness that call a module
INLINE = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")
LONGEST = 64  # characters of an expression in a name


class Site(NamedTuple):
    """Where an operator was called from."""

    module: str  # qualified name below the root, "" for the root itself
    expression: str
    source: str  # file:line, innermost

    @property
    def label(self) -> str:
        return f"{self.module}: {self.expression}" if self.module else self.expression


def site(modules: dict[int, str]) -> Site:
    """The place on the current stack that is neither PyTorch's nor the harness's; PyTorch's where
    one of its modules was called by the harness itself.

    `modules` gives the qualified names by `id(module)`.
    """
    frame: FrameType | None = sys._getframe(1)
    own: tuple[FrameType, str] | None = None  # PyTorch's innermost module
    while frame is not None and frame.f_code.co_filename.startswith(SKIPPED):
        if frame.f_code.co_filename.startswith(HARNESS):
            if frame.f_code.co_name in ENTRIES:
                frame = None
                break
        elif own is None and id(frame.f_locals.get("self")) in modules:
            own = frame, modules[id(frame.f_locals["self"])]
        frame = frame.f_back
    if frame is None and own is not None:
        source = f"{_relative(own[0].f_code.co_filename)}:{own[0].f_lineno}"
        return Site(own[1], _expression(own[0]), source)
    if frame is None:
        return Site("", "?", "?")
    source = f"{_relative(frame.f_code.co_filename)}:{frame.f_lineno}"
    shown, inline = frame, None
    while frame is not None and not frame.f_code.co_filename.startswith(HARNESS):
        if not frame.f_code.co_filename.startswith(SKIPPED):
            shown = inline or frame
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in modules:
                return Site(modules[id(owner)], _expression(shown), source)
            inline = (inline or frame) if frame.f_code.co_name in INLINE else None
        frame = frame.f_back
    return Site("", _expression(shown), source)


def _expression(frame: FrameType) -> str:
    return _text(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _text(code: CodeType, instruction: int) -> str:
    """The source text of the expression that this instruction belongs to, on one line."""
    positions = list(code.co_positions())[instruction // 2]
    first, last, start, end = positions
    if first is None or last is None or start is None or end is None:
        return "?"
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # columns count bytes
    lines[0] = lines[0][start:]
    text = " ".join(b" ".join(lines).decode(errors="replace").split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


@functools.lru_cache(maxsize=1024)
def _relative(filename: str) -> str:
    path = Path(filename)
    for root in (ROOT, Path.cwd()):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return path.name


def module_names(root: nn.Module | None) -> dict[int, str]:
    """id -> qualified name of every module below `root`, and `root` as ""."""
    if root is None:
        return {}
    return {id(module): name for name, module in root.named_modules()}


@functools.lru_cache(maxsize=512)
def result_names(fn: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names in the function's last `return a, b`, "" for what is no name; None if unknown."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError, SyntaxError):
        return None
    found = [n.value for n in ast.walk(tree) if isinstance(n, ast.Return) and n.value is not None]
    if not found:
        return None
    last = found[-1]
    items = last.elts if isinstance(last, ast.Tuple) else [last]
    return tuple(item.id if isinstance(item, ast.Name) else "" for item in items)


@functools.lru_cache(maxsize=512)
def argument_names(fn: Callable[..., Any]) -> tuple[tuple[str, ...], str | None]:
    """The names of positional parameters without `self`, and that of `*args` if there is one."""
    names, rest = [], None
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = parameter.name
        elif parameter.name != "self":
            names.append(parameter.name)
    return tuple(names), rest
