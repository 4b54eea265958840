"""Plans: the ordered list of changes enabled for a model on a device, as a TOML file.

model = "beam"
device = "NVIDIA H200"

[[change]]
name = "residual-boundary"
backend = "triton"
domain = [{"y" = {"kind" = "tensor", "dtype" = "bfloat16", "sizes" = [[1, 128], [5120, 5120]]}}]
[change.knobs."D=5120,T=1"]
num_warps = 8

`domain` is what the change was tested on (`optimized.domain`); outside it the reference runs.
`optimized.plan_text` writes the file.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from optimized.catalog import load_change
from optimized.change import Change, KnobValue, apply_change
from optimized.domain import Domain
from optimized.inductor import inductor_change
from optimized.plan_text import header_text, line_text

INDUCTOR = "inductor:"


@dataclass(frozen=True, kw_only=True)
class Enabled:
    """One line of a plan: a change by name, its backend, its tuned launch knobs by shape, and the
    domain on which it was tested (None: nowhere, so that only its own guard limits it)."""

    name: str
    backend: str
    knobs: dict[str, dict[str, KnobValue]] = field(default_factory=dict)
    domain: Domain | None = None

    def change(self) -> Change:
        """The change itself; ValueError if no change has this name."""
        if self.name.startswith(INDUCTOR):
            return inductor_change(self.name.removeprefix(INDUCTOR))
        return load_change(self.name)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is enabled for `model` on `device`, in the order in which it is applied."""

    model: str
    device: str
    changes: tuple[Enabled, ...]

    def apply(self, model: nn.Module) -> None:
        """Apply every change to `model` in place; see `optimized.change.apply_change`."""
        for enabled in self.changes:
            apply_enabled(model, enabled)

    def save(self, path: Path) -> None:
        text = header_text(self.model, self.device) + "".join(map(line_text, self.changes))
        path.write_text(text)

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """Read a plan; ValueError in one line if it is not one."""
        try:
            data = tomllib.loads(path.read_text())
            changes = tuple(_enabled(entry) for entry in data.get("change", []))
            return cls(model=data["model"], device=data["device"], changes=changes)
        except FileNotFoundError as error:
            raise ValueError(f"no plan at {path}; name a plan.toml, or a run's folder") from error
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a plan ({error}); see optimized/plan.py") from error


def _enabled(entry: dict[str, Any]) -> Enabled:
    domain = entry.get("domain")
    return Enabled(**{**entry, "domain": None if domain is None else Domain.from_json(domain)})


def apply_enabled(model: nn.Module, enabled: Enabled) -> list[str]:
    """Apply one line of a plan to `model` in place; returns the replaced nodes' names."""
    change = enabled.change()
    knobs = make_knobs(change, enabled)
    return apply_change(model, change, enabled.backend, knobs, enabled.domain)


def make_knobs(change: Change, enabled: Enabled) -> dict[str, Any]:
    """The tuned knobs by shape as the implementation's own dataclass."""
    knobs = change.implementation(enabled.backend).knobs
    if knobs is None:
        return {}
    try:
        return {shape: knobs(**values) for shape, values in enabled.knobs.items()}
    except TypeError as error:
        raise ValueError(f"knobs of {enabled.name} ({enabled.backend}): {error}") from error
