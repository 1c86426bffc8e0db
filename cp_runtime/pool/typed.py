"""Dataclasses as JSON, and back with every field checked: of messages, and of files that are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

LARGEST = 2.0**63  # numbers from here on are not believed


def encode(value: Any) -> bytes:
    """Convert dataclasses and JSON values, in any mixture, to JSON. Raises ValueError for numbers that are not finite."""
    return json.dumps(value, default=vars, separators=(",", ":"), allow_nan=False).encode()


def decode(kind: Any, value: Any) -> Any:
    """Convert JSON from `encode` back to a value of this kind, field by field.

    Args:
        kind: a dataclass, `tuple[X, ...]`, `tuple[X, Y]`, `dict[str, X]`, `X | None`, a Literal, str, int, float, bool or Any.
            Numbers are finite and not negative.

    Raises:
        ValueError: it is none.
    """
    origin = get_origin(kind)
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        hints = fields_of(kind)
        if isinstance(value, dict) and value.keys() == hints.keys():
            return kind(**{name: decode(hint, value[name]) for name, hint in hints.items()})
    elif origin is tuple:
        kinds = get_args(kind)
        if isinstance(value, list | tuple) and kinds[-1] is Ellipsis:
            return tuple(decode(kinds[0], each) for each in value)
        if isinstance(value, list | tuple) and len(value) == len(kinds):
            return tuple(map(decode, kinds, value))
    elif origin in (dict, Mapping):
        if isinstance(value, dict):
            return {name: decode(get_args(kind)[1], each) for name, each in value.items()}
    elif origin in (Union, UnionType):
        (inner,) = (each for each in get_args(kind) if each is not NoneType)
        return None if value is None else decode(inner, value)
    elif origin is Literal:
        if value in get_args(kind):
            return value
    elif kind in (str, bool):
        if isinstance(value, kind):
            return value
    elif is_number(value) and (kind is float or isinstance(value, int)):
        return value
    raise ValueError(f"no {getattr(kind, '__name__', kind)}: {value!r:.100}")


@lru_cache
def fields_of(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass by name, each with its type."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number to believe: finite, not negative, not huge, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LARGEST and math.isfinite(value)
