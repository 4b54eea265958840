"""Which changes exist: every file of this folder that defines `CHANGE`, and change files elsewhere.

A change is found by its file, so adding one needs no registry edit.
"""

import importlib
import importlib.util
import logging
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

from torch import nn

from optimized.change import Change, Implementation, served

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent


def changes() -> dict[str, Change]:
    """Every change of this folder by its name.

    A file whose optional library (Triton, CuTe DSL) is not installed is left out, with a warning.
    """
    return {name: change for name, (change, _) in _found().items()}


def file_of(name_or_path: str) -> Path:
    """The file that defines what `load_change` finds under this name; ValueError if none does."""
    if name_or_path.endswith(".py"):
        return Path(name_or_path)
    found = _found()
    if name_or_path not in found:
        raise ValueError(f"unknown change {name_or_path!r}; known: {', '.join(found)}")
    return found[name_or_path][1]


def _found() -> dict[str, tuple[Change, Path]]:
    found: dict[str, tuple[Change, Path]] = {}
    for info in pkgutil.iter_modules([str(FOLDER)]):
        if info.ispkg or "\nCHANGE" not in (FOLDER / f"{info.name}.py").read_text():
            continue
        try:
            change = _change_of(importlib.import_module(f"optimized.{info.name}"), info.name)
        except ImportError as error:
            log.warning("optimized/%s.py is left out: %s", info.name, error)
            continue
        if change.name in found:
            raise ValueError(f"two files of optimized/ define a change named {change.name!r}")
        found[change.name] = change, FOLDER / f"{info.name}.py"
    return found


def load_change(name_or_path: str) -> Change:
    """The change called `name_or_path`, or the one in the change file at that path (.py).

    Raises ValueError with one line that says what is allowed.
    """
    if name_or_path.endswith(".py"):
        return _change_of(_from_path(Path(name_or_path)), name_or_path)
    known = changes()
    if name_or_path not in known:
        raise ValueError(
            f"unknown change {name_or_path!r}; known: {', '.join(known)}, "
            "or the path of a change file (.py)"
        )
    return known[name_or_path]


def for_model(model: nn.Module, device_type: str) -> list[tuple[Change, Implementation]]:
    """What can be tried on `model`: each change once for each of its implementations that runs on
    `device_type` ("cpu" or "cuda") and serves a node in it."""
    return [
        (change, implementation)
        for change in changes().values()
        for implementation in change.implementations
        if device_type in implementation.devices and served(model, change.region, implementation)
    ]


def _change_of(module: ModuleType, file: str) -> Change:
    change = getattr(module, "CHANGE", None)
    if not isinstance(change, Change):
        raise ValueError(f"{file} is not a change file: it must define CHANGE, a Change")
    return change


def _from_path(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no change file at {path}; give the path of a .py file or a known name")
    name = f"change_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton, torch.compile and pickle look modules up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises is bad input
        raise ValueError(f"{path} failed on import: {type(error).__name__}: {error}") from error
    return module
