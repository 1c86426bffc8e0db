"""What patches note between calls, such as the residual of a step cache: the ranks say it as plain data, and ComfyUI's process
notes the same, so that whoever reads or resets it there finds what a stock run has.

Both sides number the values that the patches reach, in the same order. Tensors stay on the ranks, by numbers of their own.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import versions
from ...errors import MirrorError
from ...nested import is_plain
from .assigned import assigned
from .fingerprint import PLAIN, content_of, digest, fields_of
from .modules import type_name
from .objects import Settings, write
from .reached import functions_of_packs, holds_a_model, is_of_pack, named_globals, own_fields, reached

_JSON = (type(None), bool, int, float, str)
_FIXED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.dtype, torch.device)
SAMPLED = 4096  # numbers of a tensor
_KEYS: Mapping[type, str] = {tuple: "tuple", torch.Size: "size"}
"""Of dicts, besides plain data."""
_CONTAINERS: Mapping[str, Any] = {"dict": dict, "list": list, "tuple": tuple, "set": set}


@dataclass(frozen=True)
class Notes:
    """Patches, and where they may note something besides in themselves.

    Args:
        patches: those that no table lists.
        attributes: of the model's modules that ComfyUI does not set, by the path of the module, then by name.
        globals: of node packs, by module, then by name.
        aliased: tensors among them share memory, which they do not on the ranks.
    """

    patches: Sequence[Any]
    attributes: dict[str, dict[str, Any]]
    globals: dict[str, dict[str, Any]]
    aliased: bool = False

    @property
    def sent(self) -> tuple[str, ...]:
        """Names of the globals, as `fingerprint` has them."""
        return tuple(f"{module}:{name}" for module, held in self.globals.items() for name in held)

    @property
    def roots(self) -> list[Any]:
        return [tuple(self.patches), self.attributes, self.globals]


class Graph:
    """The values that notes reach, as they are now.

    Args:
        notes: patches and their notes.
        paths: of the model's modules, by id.
    """

    def __init__(self, notes: Notes, paths: Mapping[int, str]) -> None:
        self.values, self._notes, self._paths = reached(notes.roots), notes, paths
        self.numbers = {id(value): number for number, value in enumerate(self.values)}
        self.kind = digest(" ".join(map(type_name, self.values)))
        """The same for graphs whose values have the same numbers."""
        self._sent: set[int] = set()
        self._looks: dict[int, list[_Look]] = {}
        self._others: list[object] = []

    def look(self) -> None:
        """Remember what the values hold, for `changes`."""
        self._sent = {id(value) for value in reached(self._notes.roots, by_value=True)}
        self._looks = {number: self._look(value) for number, value in enumerate(self.values) if _is_looked_at(value)}
        self._others = self._look_at_others()

    def changes(self, number_of: Callable[[Tensor], int]) -> str:
        """Return what holds something else now, for `apply`; "" if nothing does. Raises MirrorError: it cannot be said.

        Args:
            number_of: notes a tensor, and returns its number.
        """
        if self._look_at_others() != self._others:
            raise MirrorError("patches note something where only their own process sees it")
        changed = []
        for number, before in self._looks.items():
            now, value = self._look(self.values[number]), self.values[number]
            if now == before:
                continue
            inside = [one for one, other in zip(now, before, strict=False) if one[:3] == other[:3] and one != other]
            if any(kind == "object" or (kind == "tensor" and self._notes.aliased) for _, kind, *_ in inside):
                raise MirrorError(f"patches change {type_name(inside[0][4])} in place, which other processes do not see")
            if not _travels_whole(value):
                raise MirrorError(f"patches change {type_name(value)}, whose class says itself what of it is sent")
            if not _holds(value) or id(value) not in self._sent:
                raise MirrorError(f"patches change {type_name(value)} where only their own process sees it")
            changed.append(number)
        say = _Words(dict(self.numbers), self._paths, number_of)
        told = [[number, say.content(self.values[number])] for number in changed]
        return json.dumps([self.kind, told]) if told else ""

    def _look(self, value: Any) -> list[_Look]:
        items = list(_items(value))
        if isinstance(value, (dict, list)) and type(value) not in (dict, list) and (fields := fields_of(value)):
            items.append(("its fields", fields))
        return [self._look_at(key, item) for key, item in items]

    def _look_at(self, key: Any, item: Any) -> _Look:
        if isinstance(item, PLAIN):
            return key, "plain", 0, f"{type(item).__name__} {item!r}", None
        if isinstance(item, Tensor):
            return key, "tensor", id(item), (versions([item]), sample(item)), item  # held, so that no other gets its id
        if id(item) in self.numbers or id(item) in self._paths or isinstance(item, _FIXED) or holds_a_model(item):
            return key, "known", id(item), None, item
        return key, "object", 0 if key == "its fields" else id(item), _contents(item), item

    def _look_at_others(self) -> list[object]:
        """Look at what may change besides: sets, classes, and functions' attributes and globals."""
        seen: list[object] = []
        for value in self.values:
            if isinstance(value, (set, frozenset)):
                seen.append(set(map(id, value)))
            elif isinstance(value, type):
                seen.append([(name, id(held)) for name, held in vars(value).items() if name != "__slotnames__"])
            elif isinstance(value, FunctionType):
                noted, named = self._notes.globals, named_globals(value)
                own = [(each.module, each.name, id(each.value)) for each in named if each.name not in noted.get(each.module, ())]
                seen.append((own, [(name, id(held)) for name, held in vars(value).items()]))
        return seen


_Look = tuple[Any, str, int, Any, Any]
"""Key, kind, id and state of an item, and itself."""


def _contents(value: Any) -> object:
    try:
        written = write(value, _CONTENTS)
    except MirrorError as error:  # with something that no process can be sent: an open file, a lock
        return str(error)
    return written.data, [_Numbers(owner, versions([owner])) for owner in written.owners]


_CONTENTS = Settings(devices=False)


@dataclass(eq=False)
class _Numbers:
    """A tensor as it is now, wherever it lies: nodes move their modules to the device in their first call."""

    tensor: Tensor
    versions: object

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Numbers):
            return NotImplemented
        one, two = self.tensor, other.tensor
        if one is two:
            return self.versions == other.versions
        return one.device != two.device and one.dtype == two.dtype and torch.equal(one.cpu(), two.cpu())


def sample(tensor: Tensor) -> bytes:
    """Return some numbers of a tensor: those who write to `data`, or through NumPy, leave no other trace."""
    numbers = tensor.detach()
    if numbers.layout is not torch.strided or (numbers.numel() > SAMPLED and not numbers.is_contiguous()):
        return b""
    numbers = numbers.reshape(-1)[:: max(1, numbers.numel() // SAMPLED)]
    return numbers.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def globals_of(patches: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return the globals of packs that functions of patches name and that may come to be others, by module, then by name."""
    found: dict[str, dict[str, Any]] = {}
    for each in (named for function in functions_of_packs(patches) for named in named_globals(function)):
        if _holds(each.value) or (isinstance(each.value, (*PLAIN, Tensor)) and each.name in _assigned(each.namespace)):
            found.setdefault(each.module, {})[each.name] = each.value
    return found


def tensors_in(roots: Sequence[Any]) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yield the tensors that patches or notes hold, each with what holds it and its key there."""
    for value in reached([list(roots)]):
        for key, item in _items(value) if _is_looked_at(value) else ():
            if isinstance(item, Tensor):
                yield value, key, item


def put(holder: Any, key: Any, item: Any) -> None:
    """Have a container or an object hold something else under a key."""
    if isinstance(holder, (dict, list)):
        holder[key] = item
    elif isinstance(holder, CellType):
        holder.cell_contents = item
    elif _holds(holder):
        object.__setattr__(holder, key, item)


def _assigned(namespace: Mapping[str, Any]) -> frozenset[str]:
    """Return the globals that functions of a module assign, those of its classes included."""
    module = namespace.get("__name__")
    own = [each for each in namespace.values() if getattr(each, "__module__", None) == module]
    methods = [each for cls in own if isinstance(cls, type) for each in vars(cls).values()]
    functions = [each for each in (getattr(each, "__func__", each) for each in (*own, *methods)) if isinstance(each, FunctionType)]
    bodies = [getattr(function, "__wrapped__", function).__code__ for function in functions]
    return frozenset[str]().union(*(assigned(body, "STORE_GLOBAL") for body in bodies))


def _holds(value: Any) -> bool:
    """Return whether a value may come to hold something else, which can be said."""
    if isinstance(value, (FunctionType, type)):
        return False
    return isinstance(value, (dict, list, CellType)) or is_of_pack(str(type(value).__module__))


def _is_its_fields(value: Any) -> bool:
    """Return whether an object is what it holds, and its class makes an empty one of nothing."""
    cls, kind = type(value), next((kind for kind in (dict, list) if isinstance(value, kind)), object)
    return getattr(cls, "__new__") is getattr(kind, "__new__") and not (kind is not object and fields_of(value))  # noqa: B009  (mypy)


def _travels_whole(value: Any) -> bool:
    """Return whether the next call sends all fields of an object as they are."""
    cls: Any = type(value)
    if not is_of_pack(str(cls.__module__)) or isinstance(value, (FunctionType, type, dict, list, nn.Module)):
        return True
    if cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__ or hasattr(cls, "__setstate__"):
        return False
    return getattr(cls, "__getstate__", None) is getattr(object, "__getstate__", None)


def _is_looked_at(value: Any) -> bool:
    return isinstance(value, (tuple, FunctionType, partial)) or _holds(value)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif isinstance(value, CellType):
        yield 0, content_of(value)
    elif isinstance(value, partial):
        yield from enumerate((value.func, *value.args, value.keywords))
    elif isinstance(value, FunctionType):
        yield from enumerate((*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
    else:
        yield from own_fields(value).items()


class _Words:
    """Says values as plain data."""

    def __init__(self, numbers: dict[int, int], paths: Mapping[int, str], number_of: Callable[[Tensor], int]) -> None:
        self._numbers, self._paths, self._number_of = numbers, paths, number_of
        self._next = len(numbers)
        self._new: list[Any] = []  # held, so that no other gets its id

    def content(self, value: Any) -> list[Any]:
        return [[self._key(key), self.word(item)] for key, item in _items(value)]

    def word(self, value: Any) -> Any:
        if type(value) in _JSON:  # no subclass, such as a member of an enum
            return ["is", value]
        if isinstance(value, Enum) and value.name and id(type(value)) in self._numbers:
            return ["member", self._numbers[id(type(value))], value.name]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, Tensor):
            return self._tensor(value)
        if id(value) in self._numbers:
            return ["known", self._numbers[id(value)]]
        if id(value) in self._paths:
            return ["module", self._paths[id(value)]]
        kind = type(value).__name__
        if _CONTAINERS.get(kind) is type(value):
            number = self._number(value)
            if isinstance(value, dict):
                return [kind, number, self.content(value)]
            return [kind, number, [self.word(item) for item in value]]
        if _holds(value) and id(type(value)) in self._numbers and _is_its_fields(value):
            return ["object", self._number(value), self._numbers[id(type(value))], self.content(value)]
        raise MirrorError(f"patches note an object of the class {type_name(value)}, which cannot be sent")

    def _number(self, value: Any) -> int:
        self._new.append(value)
        self._numbers[id(value)], self._next = self._next, self._next + 1
        return self._next - 1

    def _tensor(self, value: Tensor) -> Any:
        if not is_plain(value) or value.layout is not torch.strided:
            raise MirrorError(f"patches note a tensor of the class {type(value).__name__}, which cannot be sent")
        dtype = str(value.dtype).removeprefix("torch.")
        return ["tensor", self._number_of(value), dtype, list(value.shape), list(value.stride()), value.device.type == "cpu"]

    def _key(self, key: Any) -> Any:
        if type(key) in _JSON:
            return ["is", key]
        if (kind := _KEYS.get(type(key))) is not None:
            return [kind, [self._key(each) for each in key]]
        if isinstance(key, torch.dtype):
            return ["dtype", str(key).removeprefix("torch.")]
        raise MirrorError(f"patches note something under a key of the class {type_name(key)}, which cannot be sent")


def apply(changes: str, graph: Graph, module: Callable[[str], nn.Module], tensor: Callable[..., Tensor]) -> None:
    """Have the values of a graph hold what those of the ranks hold. Raises MirrorError: the ranks' graph is another one.

    Args:
        module: returns a module of the model by its path.
        tensor: makes a tensor that a rank keeps: number, name of its dtype, shape, strides, whether it is in host memory.
    """
    kind, told = json.loads(changes)
    if kind != graph.kind:
        raise MirrorError("patches on the workers reach something else than here")
    values = dict(enumerate(graph.values))

    def key(word: Any) -> Any:
        kind, value = word
        if kind == "dtype":
            return getattr(torch, value)
        return next((cls(map(key, value)) for cls, name in _KEYS.items() if name == kind), value)

    def made(word: Any) -> Any:
        kind, *rest = word
        if kind == "is":
            return rest[0]
        if kind == "dtype":
            return getattr(torch, rest[0])
        if kind == "member":
            return values[rest[0]][rest[1]]
        if kind == "tensor":
            return tensor(*rest)
        if kind == "known":
            return values[rest[0]]
        if kind == "module":
            return module(rest[0])
        if kind == "object":
            number, cls, content = rest
            values[number] = value = values[cls].__new__(values[cls])
            fill(value, content)
        elif kind == "dict":
            values[rest[0]] = value = {}
            fill(value, rest[1])
        elif kind == "list":
            values[rest[0]] = value = []
            value.extend(map(made, rest[1]))
        else:
            values[rest[0]] = value = _CONTAINERS[kind](map(made, rest[1]))
        return value

    def fill(value: Any, content: Any) -> None:
        items = [(key(word), made(item)) for word, item in content]
        if isinstance(value, dict):  # not by methods of its class: that of a Counter adds
            base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
            base.clear(value)
            for name, item in items:
                base.__setitem__(value, name, item)
        elif isinstance(value, list):
            list.__setitem__(value, slice(None), [item for _, item in items])
        elif isinstance(value, CellType):
            value.cell_contents = items[0][1]
        else:
            for name in own_fields(value).keys() - dict(items).keys():
                object.__delattr__(value, name)
            for name, item in items:
                object.__setattr__(value, name, item)

    for number, content in told:
        fill(values[number], content)
