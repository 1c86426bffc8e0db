"""Values of messages: a JSON tree and the raw bytes of its tensors. Reading it runs no code.

A value (numbers, text, containers, tensors, dtypes) becomes a JSON tree and a list of tensors. In the tree, containers that
JSON does not know and leaves that are not JSON are objects with one key that starts with `$`.

Dataclasses, of messages and of files that are kept, become JSON by `encode`, and come back by `decode` with every field checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeGuard, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..errors import ProtocolError, UnsentError

ALIGNMENT = 64  # bytes: a cache line, and a multiple of every dtype's size, which views need
MAX_DEPTH = 100  # containers inside each other; below what Python's stack takes

Tree = Any
PLAIN = "numbers, text, lists, tuples, dicts, tensors"
_SCALARS = (type(None), bool, int, str)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Unsent:
    """Stands for a value that cannot be sent. A rank may hold it and look whether it is None; any use raises UnsentError.

    Args:
        what: its path and type.
    """

    def __init__(self, what: str) -> None:
        vars(self)["what"] = what

    def __repr__(self) -> str:
        return f"Unsent({self.what!r})"

    def __getattr__(self, name: str) -> Any:
        return self._used()

    def _used(self, *_: Any) -> NoReturn:
        raise UnsentError(f"the model's forward uses {self.what}, which cannot be sent to the workers (allowed: {PLAIN}).")


# Operators are looked up on the class.
_USES = """
    bool int float complex index len iter next contains getitem setitem delitem call enter exit eq ne lt le gt ge neg pos abs invert
    add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor radd rsub rmul rmatmul rtruediv rfloordiv rmod rpow
    rand ror rxor setattr
"""
for _name in _USES.split():
    setattr(Unsent, f"__{_name}__", Unsent._used)
Unsent.__hash__ = object.__hash__  # type: ignore[method-assign]


def flatten(value: Any, store: Callable[[Tensor, str], Tree], path: str = "") -> Tree:
    """Turn `value` into a JSON tree. `store(tensor, path)` returns the leaf that stands for a tensor. Raises UnsentError:
    something inside is neither plain data nor a tensor; the message has its path and type."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) in (Tensor, torch.nn.Parameter):  # no subclass, which may be more than its numbers
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
    if type(value) is Unsent:
        return {"$unsent": value.what}
    raise UnsentError(
        f"{path or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to the workers "
        f"(allowed: {PLAIN})"
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
        if kind == "$unsent":
            return Unsent(str(body))
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
            raise UnsentError(f"{path}: a {tensor.layout} tensor on {tensor.device} cannot be sent to the workers")
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
    if offset < 0 or offset % ALIGNMENT or min(shape, default=0) < 0 or offset + count > block.numel():
        raise ProtocolError(f"a tensor of {count} bytes at {offset} lies outside of the {block.numel()} bytes sent")
    return block[offset : offset + count].view(dtype).view(tuple(shape))


def read_tensor(block: Tensor, leaf: Tree) -> Tensor:
    """View the tensor of a leaf that `TensorPacker.add` made. It shares memory with the block."""
    try:
        name, shape, offset = leaf["$tensor"]
        dtype = _DTYPES[name]
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"unknown leaf in a message: {str(leaf)[:80]}") from error
    if type(shape) is not list or not {int}.issuperset(map(type, (*shape, offset))):
        raise ProtocolError(f"unknown leaf in a message: {str(leaf)[:80]}")
    return tensor_view(block, dtype, shape, offset)


LARGEST = 2.0**63  # numbers from here on are refused


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
    return _decoder(kind)(value)


@lru_cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    """Return the function that decodes values of a kind: types are looked at once, and not for every message."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if isinstance(kind, type) and is_dataclass(kind):
        hints = fields_of(kind)
        checked = [(name, _plain(hint), _decoder(hint)) for name, hint in hints.items() if hint is not Any]
        return partial(_decode_fields, kind, hints.keys(), checked)
    if origin is tuple and parts[-1] is Ellipsis:
        each = _decoder(parts[0])
        return lambda value: tuple(map(each, _checked(kind, value, (list, tuple))))
    if origin is tuple:
        decoders = tuple(map(_decoder, parts))
        return lambda value: tuple(
            decoder(item) for decoder, item in zip(decoders, _checked(kind, value, (list, tuple), len(parts)), strict=True)
        )
    if origin in (dict, Mapping):
        each = _decoder(parts[1])
        return lambda value: {name: each(item) for name, item in _checked(kind, value, dict).items()}
    if origin in (Union, UnionType):
        (inner,) = (_decoder(part) for part in parts if part is not NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is Literal:
        return lambda value: value if value in parts else _refuse(kind, value)
    if kind in (str, bool):
        return lambda value: _checked(kind, value, kind)
    return lambda value: value if is_number(value) and (kind is float or isinstance(value, int)) else _refuse(kind, value)


def _decode_fields(
    kind: type, names: Set[str], decoders: Sequence[tuple[str, frozenset[type], Callable[[Any], Any]]], value: Any
) -> Any:
    """Decode a dataclass. Most fields are numbers and text: they are checked right here."""
    if not isinstance(value, dict) or value.keys() != names:
        _refuse(kind, value)
    given = dict(value)
    for name, plain, decoder in decoders:
        item = value[name]
        if type(item) not in plain or (type(item) in _NUMBERS and not 0 <= item < LARGEST):
            given[name] = decoder(item)
    return kind(**given)


_NUMBERS = (int, float)


def _plain(hint: Any) -> frozenset[type]:
    """Return the types of JSON that are values of a kind as they are, numbers in their range."""
    if get_origin(hint) in (Union, UnionType):
        return frozenset().union(*map(_plain, get_args(hint)))
    return frozenset({float: _NUMBERS}.get(hint, (hint,))) & {str, bool, int, float, NoneType}


def _checked(kind: Any, value: Any, types: Any, length: int | None = None) -> Any:
    if isinstance(value, types) and length in (None, len(value)):
        return value
    return _refuse(kind, value)


def _refuse(kind: Any, value: Any) -> NoReturn:
    raise ValueError(f"no {getattr(kind, '__name__', kind)}: {value!r:.100}")


@lru_cache
def fields_of(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass by name, each with its type."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a plausible number: finite, not negative, not huge, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LARGEST and math.isfinite(value)
