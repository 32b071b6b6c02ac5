"""Frozen dataclasses to JSON text and back, exactly: same value, same bytes, no unknown keys.

Supports what the format uses: str, int, float, bool, enums, tuples of one element type, mappings
with str keys, `X | None`, and dataclasses of these.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

T = TypeVar("T")


class FormatError(ValueError):
    """The text is not what the schema says; the message names the place."""


def dump(value: object) -> str:
    """Deterministic JSON: keys in field order, one trailing newline."""
    return json.dumps(_plain(value), indent=1, ensure_ascii=False) + "\n"


def load(cls: type[T], text: str) -> T:
    """The inverse of `dump`; FormatError names the first field that does not fit `cls`."""
    try:
        data = json.loads(text)
    except ValueError as bad:
        raise FormatError(f"not JSON: {bad}") from None
    except RecursionError:
        raise FormatError("not JSON we wrote: nested too deeply") from None
    value = _typed(cls, data, cls.__name__)
    assert isinstance(value, cls)
    return value


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in sorted(value)}
    return value


def _typed(kind: object, data: object, where: str) -> object:
    origin = typing.get_origin(kind)
    if origin is tuple:
        if not isinstance(data, list):
            raise FormatError(f"{where}: a list expected, found {_found(data)}")
        item = typing.get_args(kind)[0]
        return tuple(_typed(item, value, f"{where}[{i}]") for i, value in enumerate(data))
    if origin in (types.UnionType, typing.Union):
        options = [k for k in typing.get_args(kind) if k is not type(None)]
        return None if data is None else _typed(options[0], data, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise FormatError(f"{where}: an object expected, found {_found(data)}")
        return {key: _typed(typing.get_args(kind)[1], data[key], f"{where}.{key}") for key in data}
    assert isinstance(kind, type)
    if dataclasses.is_dataclass(kind):
        return _typed_fields(kind, data, where)
    if issubclass(kind, Enum):
        try:
            return kind(data)
        except ValueError:
            raise FormatError(f"{where}: unknown value {data!r}") from None
    wanted = (int, float) if kind is float else kind
    if not isinstance(data, wanted) or (isinstance(data, bool) and kind is not bool):
        raise FormatError(f"{where}: {kind.__name__} expected, found {_found(data)}")
    return float(data) if isinstance(data, int) and kind is float else data


def _typed_fields(kind: type, data: object, where: str) -> object:
    if not isinstance(data, dict):
        raise FormatError(f"{where}: an object expected, found {_found(data)}")
    hints = _hints(kind)
    names = list(hints)
    missing = [name for name in names if name not in data]
    unknown = [name for name in data if name not in names]
    if missing or unknown:
        raise FormatError(f"{where}: missing {missing}, unknown {unknown}")
    return kind(**{name: _typed(hints[name], data[name], f"{where}.{name}") for name in names})


@functools.cache
def _hints(kind: type) -> dict[str, object]:
    """Field types in field order; evaluating annotations is most of the time of loading a plan."""
    evaluated = typing.get_type_hints(kind)
    return {field.name: evaluated[field.name] for field in dataclasses.fields(kind)}


def _found(data: object) -> str:
    return {dict: "an object", list: "a list", type(None): "null"}.get(type(data), repr(data)[:40])
