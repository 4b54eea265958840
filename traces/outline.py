"""The outline of a model: its modules, the region and source of each, and its layers."""

import inspect
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch import nn

from optimized.change import region_of
from traces.trace import ModuleInfo, Outline

ROOT = Path(__file__).resolve().parents[1]
# Code that serves the model and is not part of it.
SERVING = {"torch", "triton", "traces", "harness", "agents"}
HIDDEN = "__tracebackhide__"
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def outline(model: nn.Module) -> Outline:
    """The modules of `model` in order; its layers are the elements of its outermost ModuleList."""
    return Outline(
        modules=tuple(
            ModuleInfo(
                name=name,
                cls=type(module).__name__,
                region=region_of(module) if name else None,
                kind=_kind(module),
                source=forward_line(module),
            )
            for name, module in model.named_modules()
        ),
        layers=layers(model),
    )


def layers(model: nn.Module) -> tuple[str, ...]:
    """Qualified names of the elements of the ModuleList with the fewest dots in its name."""
    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        return ()
    outermost = min(lists, key=lambda name: (name.count("."), lists.index(name)))
    return tuple(f"{outermost}.{child}" for child, _ in _children(model, outermost))


def _children(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name).named_children()


def _kind(module: nn.Module) -> str | None:
    kind = getattr(module, "kind", None)
    return kind if isinstance(kind, str) else None


def forward_line(module: nn.Module) -> str | None:
    """file:line of the forward that the module's class defines."""
    code = _forward_code(module)
    return None if code is None else f"{short(code.co_filename)}:{code.co_firstlineno}"


def _forward_code(module: nn.Module) -> CodeType | None:
    """The code of the forward that the module's class defines outside PyTorch, if it does."""
    forward = inspect.unwrap(type(module).forward)
    if getattr(forward, "__module__", "").partition(".")[0] == "torch":
        return None
    return getattr(forward, "__code__", None)


def short(filename: str) -> str:
    """The path from the project's root where the file is inside it."""
    path = Path(filename)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else filename


def class_files(model: nn.Module) -> frozenset[str]:
    """The files that define the classes of the model's modules, PyTorch's own left out."""
    codes = (_forward_code(module) for module in model.modules())
    return frozenset(code.co_filename for code in codes if code is not None)


def model_frame(frame: FrameType | None, files: frozenset[str]) -> FrameType | None:
    """The innermost frame at or above `frame` in the model's own code: in one of `files`, or in no
    library, the interpreter, nor this framework's own tools.

    A helper that many places share marks itself by a local `__tracebackhide__ = True`, as pytest
    has it; the line is then that of its caller.
    """
    while frame is not None:
        filename = frame.f_code.co_filename
        if _hidden(frame):
            frame = frame.f_back
            continue
        if filename in files:
            return frame
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        foreign = package in SERVING or package in sys.stdlib_module_names
        if not foreign and not filename.startswith((*LIBRARIES, "<")):
            return frame
        frame = frame.f_back
    return None


def _hidden(frame: FrameType) -> bool:
    marked = HIDDEN in frame.f_code.co_varnames  # before the locals, which are copied to be read
    return marked and bool(frame.f_locals.get(HIDDEN))


def passes(frame: FrameType | None, package: str) -> bool:
    """Whether `frame` or one above it runs code of `package`."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name == package or name.startswith(f"{package}."):
            return True
        frame = frame.f_back
    return False


def frame_line(frame: FrameType) -> str:
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
