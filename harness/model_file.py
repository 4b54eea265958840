"""A model file that somebody gave us: what it gets wrong is one line, with its own line number."""

import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from harness.errors import UserError
from reference import models

HINT = 'reference/README.md says what one defines, "A model file"'
# (batch, tokens, context) of the calls that show whether it can be called at all: a prefill of two
# sequences, and a decode.
CALLS = (2, 4, 8), (1, 1, 8)


def load(model: str) -> models.ModelFile:
    """The model file named `model`, or at that path; UserError for what it lacks."""
    try:
        file = models.load(model)
    except ValueError as error:
        cause = error.__cause__
        where = "" if cause is None else line_of(Path(model), cause)
        raise UserError(f"{error}{where}") from error
    except SystemExit as error:
        raise UserError(f"{model} ended the program on import; {HINT}") from error
    if not model.endswith(".py"):
        return file
    return cast(models.ModelFile, GivenFile(Path(model), cast(ModuleType, file)))


class GivenFile:
    """The model file at `path`. Whatever its functions raise becomes a UserError, but for exhausted
    memory."""

    def __init__(self, path: Path, module: ModuleType) -> None:
        self.path, self.module = path, module
        self.__file__ = module.__file__
        self.configs: Mapping[str, Any] = module.configs
        if not isinstance(self.configs, Mapping) or not self.configs:
            raise UserError(
                f"{path}: configs is {self.configs!r:.80}; it must map at least one name to a "
                f"configuration: {HINT}"
            )
        if bad := [name for name in self.configs if not isinstance(name, str)]:
            raise UserError(f"{path}: configs has the name {bad[0]!r:.80}; names are text: {HINT}")
        for name in ("build", "cache"):
            if not callable(getattr(module, name)):
                raise UserError(f"{path}: {name} is no function: {HINT}")

    def build(self, config: Any, device: Any, seed: int) -> nn.Module:
        model = self._call("build", self.module.build, config, device, seed)
        if not isinstance(model, nn.Module):
            raise UserError(f"{self.path}: build returned {_kind(model)}, not an nn.Module; {HINT}")
        return model

    def cache(self, config: Any, batch: int, capacity: int, device: Any) -> Any:
        return self._call("cache", self.module.cache, config, batch, capacity, device)

    def try_out(self, model: nn.Module, config: Any, device: torch.device) -> None:
        """Call `model` once as a prefill and once as a decode; UserError where it cannot be."""
        for batch, tokens, context in CALLS:
            cache = self.cache(config, batch, context, device)
            ids = torch.zeros(batch, tokens, dtype=torch.int64, device=device)
            positions = torch.arange(context - tokens, context, device=device).expand(batch, -1)
            with torch.no_grad():
                what = f"forward of {batch} x {tokens} token(s)"
                result = self._call(what, model, ids, positions.contiguous(), cache)
            if not isinstance(result, Tensor):
                raise UserError(
                    f"{self.path}: {what} returned {_kind(result)}, not a tensor of logits; {HINT}"
                )

    def _call(self, what: str, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except (torch.OutOfMemoryError, MemoryError, UserError):
            raise
        except (Exception, SystemExit) as error:  # whatever the user's file raises is bad input
            said = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{self.path}: {what} raised {said:.300}{line_of(self.path, error)}; {HINT}"
            ) from error


def line_of(path: Path, error: BaseException) -> str:
    """ " (FILE:LINE)", the last line of the file at `path` that the error came through; "" if it
    came through none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).resolve() == path.resolve()]
    return f" ({path}:{lines[-1]})" if lines else ""


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
