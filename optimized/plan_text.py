"""A plan as text, torch-free: its TOML, line by line, and where the repository keeps it."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from optimized.domain import Domain

FOLDER = "optimized/plans"
AUTO = "auto"  # in place of a file: what the repository keeps for the model and the device


class Line(Protocol):
    """A change as a plan enables it."""

    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def knobs(self) -> Mapping[str, Mapping[str, Any]]: ...
    @property
    def domain(self) -> Domain | None: ...


def header_text(model: str, device: str) -> str:
    return f"model = {json.dumps(model)}\ndevice = {json.dumps(device)}\n"


def line_text(line: Line) -> str:
    """One change of a plan, with the empty line before it."""
    lines = ["", "[[change]]", f"name = {json.dumps(line.name)}"]
    lines.append(f"backend = {json.dumps(line.backend)}")
    if line.domain is not None:
        lines.append(f"domain = {_inline(line.domain.to_json())}")
    for shape, knobs in line.knobs.items():
        lines.append(f"[change.knobs.{json.dumps(shape)}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in knobs.items()]
    return "\n".join(lines) + "\n"


def names(text: str) -> list[str]:
    """The changes that a plan enables, in order; ValueError if it is no plan."""
    try:
        return [entry["name"] for entry in tomllib.loads(text).get("change", [])]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a plan: {error}") from error


def stem(model: str, device: str) -> str:
    """What the plan of `model` on `device` is called: "toy-nvidia-h200"."""
    return f"{slug(Path(model).name.removesuffix('.py'))}-{slug(device)}"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def place(model: str, device: str) -> str:
    """Where the repository keeps that plan, relative to its top."""
    return f"{FOLDER}/{stem(model, device)}.toml"


def _inline(value: Any) -> str:
    """A JSON value without nulls as TOML on one line."""
    if isinstance(value, dict):
        items = (f"{json.dumps(key)} = {_inline(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return json.dumps(value)
