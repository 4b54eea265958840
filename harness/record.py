"""The base of all records, torch-free: to and from JSON, and a hash of the content."""

import hashlib
import json
import types
import typing
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, Self

from optimized.domain import Domain


class Record:
    """Base of all records: to and from JSON, and a content hash."""

    def to_json(self) -> dict[str, Any]:
        return _encode(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Rebuild the record; unknown or missing keys raise ValueError that names them."""
        hints = typing.get_type_hints(cls)
        names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        if unknown := set(data) - names:
            raise ValueError(
                f"{cls.__name__} has no field {sorted(unknown)}; known: {sorted(names)}"
            )
        try:
            return cls(**{name: _decode(hints[name], value) for name, value in data.items()})
        except TypeError as error:
            raise ValueError(f"{cls.__name__}: {error}") from error

    @property
    def id(self) -> str:
        """The first 12 hex digits of the SHA-256 of the record's content."""
        return content_hash(self.to_json())


def _encode(value: Any) -> Any:
    """JSON of a record and all it holds; tuples stay tuples."""
    if isinstance(value, Domain):
        return value.to_json()
    if is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return type(value)(_encode(item) for item in value)
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    return value


def content_hash(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _decode(hint: Any, value: Any) -> Any:
    """Turn JSON `value` into what the annotation `hint` says."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _decode(next(a for a in args if a is not type(None)), value)
    if origin is tuple:
        if len(args) == 2 and args[1] is ...:
            return tuple(_decode(args[0], v) for v in value)
        return tuple(_decode(a, v) for a, v in zip(args, value, strict=True))
    if origin is dict:
        return {k: _decode(args[1], v) for k, v in value.items()}
    if isinstance(hint, type):
        if hint is Domain:
            return Domain.from_json(value)
        if issubclass(hint, Record) and is_dataclass(hint):
            return hint.from_json(value)
        if issubclass(hint, StrEnum):
            return hint(value)
        if hint is float and isinstance(value, int):
            return float(value)
    return value
