"""Finding a model: by name (a file in this folder) or by the path of a model file.

A model file exposes `configs` (name -> config), `build(config, device, seed) -> nn.Module` whose
`forward(ids, positions, cache)` serves prefill and decode, and
`cache(config, batch, capacity, device)`.
"""

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from torch import nn

PROTOCOL = "configs", "build", "cache"


class ModelFile(Protocol):
    """What a model file exposes."""

    configs: Mapping[str, Any]

    def build(self, config: Any, device: Any, seed: int) -> nn.Module: ...
    def cache(self, config: Any, batch: int, capacity: int, device: Any) -> Any: ...


def names() -> list[str]:
    """The models that ship: the files of this folder that define `configs`."""
    folder = Path(__file__).parent
    found = []
    for info in pkgutil.iter_modules([str(folder)]):
        if "\nconfigs" in (folder / f"{info.name}.py").read_text():
            found.append(info.name.replace("_", "-"))
    return found


def load(model: str) -> ModelFile:
    """The model file named `model`, or at the path `model` if it ends in .py.

    Raises ValueError with one line that says what is allowed.
    """
    if model.endswith(".py"):
        module = _from_path(Path(model))
    elif model.replace("_", "-") in names():
        module = importlib.import_module(f"reference.{model.replace('-', '_')}")
    else:
        raise ValueError(
            f"unknown model {model!r}; known: {', '.join(names())}, "
            "or the path of a model file (.py)"
        )
    if missing := [name for name in PROTOCOL if not hasattr(module, name)]:
        raise ValueError(
            f"{model} is not a model file: it lacks {', '.join(missing)}; "
            f"it must define {', '.join(PROTOCOL)}"
        )
    return cast(ModelFile, module)


def _from_path(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no model file at {path}; give the path of a .py file or a known name")
    # One module for one text in one place: a class made twice could not be pickled.
    text = str(path.resolve()).encode() + path.read_bytes()
    name = f"model_file_{path.stem}_{hashlib.sha256(text).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # torch.compile and pickle look modules up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises is bad input
        del sys.modules[name]
        what = " ".join(str(error).split())  # one line
        raise ValueError(f"{path} failed on import: {type(error).__name__}: {what}") from error
    return module
