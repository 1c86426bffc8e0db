"""Values of messages: a JSON tree and the raw bytes of its tensors. Nothing is ever unpickled.

A value (numbers, text, containers, tensors, dtypes) becomes a JSON tree and a list of tensors. In the tree, containers that
JSON does not know and leaves that are not JSON are objects with one key that starts with `$`.

Dataclasses, of messages and of files that are kept, become JSON by `encode`, and come back by `decode` with every field checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..errors import ProtocolError, UnsupportedError

ALIGNMENT = 64
MAX_DEPTH = 100  # containers inside each other; below what Python's stack takes

Tree = Any
_SCALARS = (type(None), bool, int, str)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def flatten(value: Any, store: Callable[[Tensor, str], Tree], path: str = "") -> Tree:
    """Turn `value` into a JSON tree. `store(tensor, path)` returns the leaf that stands for a tensor. Raises UnsupportedError:
    something inside is neither plain data nor a tensor; the message has its path and type."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) in (Tensor, torch.nn.Parameter):
        return store(value, path)
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if type(value) in (tuple, torch.Size):
        return {"$tuple": [flatten(item, store, f"{path}[{i}]") for i, item in enumerate(value)]}
    if type(value) is list:
        return [flatten(item, store, f"{path}[{i}]") for i, item in enumerate(value)]
    if type(value) is dict:
        return {"$dict": [[flatten(k, store, path), flatten(v, store, f"{path}[{k!r}]")] for k, v in value.items()]}
    raise UnsupportedError(
        f"{path or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to the workers "
        "(allowed: numbers, text, lists, tuples, dicts, tensors)"
    )


def unflatten(tree: Tree, load: Callable[[Tree], Tensor], depth: int = 0) -> Any:
    """Rebuild a value from what `flatten` returned. `load(leaf)` returns the tensor of a leaf that `store` made. Raises
    ProtocolError: the tree is not one that `flatten` makes."""
    if isinstance(tree, (*_SCALARS, float)):
        return tree
    if depth > MAX_DEPTH:
        raise ProtocolError(f"a value in a message is nested deeper than {MAX_DEPTH}")
    depth += 1
    if isinstance(tree, list):
        return [unflatten(item, load, depth) for item in tree]
    if not isinstance(tree, dict) or len(tree) != 1:
        raise ProtocolError(f"malformed value in a message: {str(tree)[:80]}")
    ((kind, body),) = tree.items()
    try:
        if kind == "$tuple":
            return tuple(unflatten(item, load, depth) for item in body)
        if kind == "$dict":
            return {unflatten(k, load, depth): unflatten(v, load, depth) for k, v in body}
        if kind == "$float":
            return float(body)
        if kind == "$dtype":
            return _DTYPES[body]
        if kind == "$device":
            return torch.device(body)
        return load(tree)
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError) as error:
        if isinstance(error, ProtocolError):
            raise
        raise ProtocolError(f"malformed {kind} in a message: {str(body)[:80]}") from error


class TensorPacker:
    """Collects tensors and lays them out one after the other in a block of bytes."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.offsets: list[int] = []
        self.nbytes = 0
        self._seen: dict[int, int] = {}

    def add(self, tensor: Tensor, path: str = "") -> Tree:
        """Return the leaf for `tensor`. The same tensor object is laid out once."""
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise UnsupportedError(f"{path}: a {tensor.layout} tensor on {tensor.device} cannot be sent to the workers")
        index = self._seen.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
            self.offsets.append(self.nbytes)
            self.nbytes += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        return {"$tensor": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.offsets[index]]}

    def write(self, block: Tensor) -> None:
        """Copy all tensors into a uint8 tensor of at least `nbytes` elements."""
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            tensor_view(block, tensor.dtype, tensor.shape, offset).copy_(tensor)


def tensor_view(block: Tensor, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
    """View bytes of a uint8 tensor as a tensor. Raises ProtocolError: the tensor would not lie inside the block."""
    count = math.prod(shape) * dtype.itemsize
    if offset < 0 or offset % ALIGNMENT or any(size < 0 for size in shape) or offset + count > block.numel():
        raise ProtocolError(f"a tensor of {count} bytes at {offset} lies outside of the {block.numel()} bytes sent")
    return block[offset : offset + count].view(dtype).view(tuple(shape))


def read_tensor(block: Tensor, leaf: Tree) -> Tensor:
    """View the tensor of a leaf that `TensorPacker.add` made. It shares memory with the block."""
    try:
        name, shape, offset = leaf["$tensor"]
        dtype = _DTYPES[name]
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"unknown leaf in a message: {str(leaf)[:80]}") from error
    if type(shape) is not list or any(type(number) is not int for number in (*shape, offset)):
        raise ProtocolError(f"unknown leaf in a message: {str(leaf)[:80]}")
    return tensor_view(block, dtype, shape, offset)


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
