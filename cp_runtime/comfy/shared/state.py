"""What the instances of a network's modules hold, as paths and hashes, made by the same function in ComfyUI's process and on every
rank. Ranks load the file by themselves: a node that sets an attribute of a layer, a field of an object that it holds, a method of
one instance, a layer in another's place, a hook or a buffer changes the network of ComfyUI's process only.

Weights count by dtype and shape; `weights` compares their numbers.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...compat import children_of, global_hooks, hooks_of, slots
from ...nested import is_plain_storage_subclass
from .assigned import set_later
from .fingerprint import CACHED, PLAIN, builtin_name, content_of, digest, fields_of, hash_of, plain_text, type_name
from .modules import BOOKKEEPING, STANDARD
from .origin import in_library, is_computing
from .weights import is_dynamic, network_of, sample

SAVING = "state_dict"  # `ui.files` replaces it, and nothing computes with it
OF_DEVICE = "_full_precision_mm"  # of layers of ComfyUI: whether the devices that it knows multiply a weight's format
FORMAT = "format of "
HIDES = " hides the class's"
CLASS, CHILDREN, TRAINING, HOOKS = "its class", "its modules or their order", "its mode, training or not,", "its hooks"


class State(NamedTuple):
    """What the modules of a network hold.

    Args:
        held: path of a module -> attribute, or one of the words above -> text or hash.
        contents: `path.attribute` -> samples of the tensors there, other than weights, which are in host memory. Another computer's
            processor may have rounded some otherwise.
    """

    held: Mapping[str, Mapping[str, str]]
    contents: Mapping[str, str]


def state_of(model: Any) -> State:
    """Return the state of the network of a `BaseModel`, a VAE, or of a network itself. Full Flux, 955 modules: 13 ms."""
    network = network_of(model)
    reader = _Reader(model, {id(module): path for path, module in network.named_modules()})
    held = {path: reader.module(path, module) for path, module in network.named_modules(remove_duplicate=False)}
    if (everywhere := reader.hooks(global_hooks(), network)) is not None:
        held[""][f"{HOOKS} of all modules"] = everywhere
    return State(held, reader.contents)


def change_in(before: State, now: State, patched: Collection[str] = ()) -> str:
    """Return a change in words, "padding_mode of decoder.conv_in"; empty without one.

    Args:
        patched: paths of attributes that ComfyUI has patched, and will restore.
    """
    return next(_changes(before, now, patched), "")


def _changes(before: State, now: State, patched: Collection[str]) -> Iterator[str]:
    for path in {**before.held, **now.held}:
        one, other = before.held.get(path), now.held.get(path)
        if one == other or path in patched:
            continue
        if one is None or other is None:
            parent, _, name = path.rpartition(".")
            yield f"{name} of {parent or 'the model'}"
            continue
        where = path or "the model"
        if one[CLASS] != other[CLASS]:
            yield f"the class of {where}, now {other[CLASS].rpartition('.')[2]}"
        for name in {**one, **other}:
            # A new name that hides nothing of the class is a note of ComfyUI's or of a pack's, which nothing here reads.
            is_note = name not in one and " " not in name and not other[name].endswith(HIDES)
            same = one.get(name) == other.get(name) or (name.startswith(FORMAT) and _may_be_one(one.get(name), other.get(name)))
            if not same and not is_note and f"{path}.{name.removeprefix(FORMAT)}".lstrip(".") not in patched:
                yield f"{name} of {where}"
    for name in before.contents.keys() & now.contents.keys() - set(patched):
        if _are_others(before.contents[name], now.contents[name]):
            parent, _, attribute = name.rpartition(".")
            yield f"buffer {attribute} of {parent or 'the model'}"


def _are_others(one: str, other: str) -> bool:
    """Return whether samples are of other numbers in the same formats. DynamicVRAM keeps those of the file at first."""
    pairs = list(zip(one.split("|"), other.split("|"), strict=False))
    same_formats = all(a.partition(" ")[0] == b.partition(" ")[0] for a, b in pairs)
    return one != other and same_formats


class _Reader:
    """Makes texts of what modules hold. `paths`: of the network's modules, by id."""

    def __init__(self, model: Any, paths: Mapping[int, str]) -> None:
        self._model, self._paths = model, paths
        self.contents: dict[str, str] = {}
        self._at = ""

    def module(self, path: str, module: nn.Module, seen: tuple[int, ...] = ()) -> dict[str, str]:
        cls, at = type(module), f"{path}." if path else ""
        parameters, buffers, children = slots(module)
        held = {CLASS: type_name(cls), CHILDREN: " ".join(children)}
        if module.training:
            held[TRAINING] = "yes"
        self._at = f"{at}{HOOKS}"
        if (hooks := self.hooks(hooks_of(module), module, seen)) is not None:
            held[HOOKS] = hooks
        for name, parameter in parameters.items():
            if parameter is not None and seen:  # in no list of modules: no comparison of weights sees it
                self._at = f"{at}{name}"
                self._note_content(parameter)
            held[f"{FORMAT}{name}"] = "none" if parameter is None else _format(parameter, self._noted(module, name))
        for name, buffer in buffers.items():
            self._at = f"{at}{name}"
            if buffer is not None:
                self._note_content(buffer)
            held[f"{FORMAT}{name}"] = "none" if buffer is None else _format(buffer, self._noted(module, name))
        for name, value in vars(module).items():
            if value is None and name in ("weight", "bias"):  # no parameter yet, or none at all: ComfyUI makes layers in both ways
                held[f"{FORMAT}{name}"] = "none"
            elif name not in STANDARD and name != SAVING and not BOOKKEEPING.fullmatch(name) and not is_ours(value):
                stock = getattr(cls, name, None) if type(value) is MethodType else None
                if stock is None or value.__func__ is not stock:  # ComfyUI leaves the stock method after a patch
                    self._at = f"{at}{name}"
                    held[name] = digest(self._text(value, module, seen)) + (HIDES if hasattr(cls, name) else "")
        return held

    def hooks(self, hooks: Sequence[Mapping[int, Any]], owner: nn.Module, seen: tuple[int, ...] = ()) -> str | None:
        """Return a hash of hooks that are not ours, None without any."""
        foreign = [hook for each in hooks for hook in each.values() if not is_ours(hook)]
        return digest(self._text(foreign, owner, seen)) if foreign else None

    def _text(self, value: Any, owner: nn.Module, seen: tuple[int, ...] = ()) -> str:
        """Return a text for a value: constants and containers by content, objects by class and fields, functions by their code."""
        try:
            return self._readable(value, owner, seen)
        except Exception as error:  # noqa: BLE001  (an object of a pack may raise anything when it is looked at)
            return f"unreadable, {type(error).__name__}"

    def _readable(self, value: Any, owner: nn.Module, seen: tuple[int, ...]) -> str:
        if type(value) in PLAIN:
            return plain_text(value)
        if value is owner:
            return "the module"
        if id(value) in self._paths:
            return f"module {self._paths[id(value)]}"
        if id(value) in seen:
            return "again"
        seen = (*seen, id(value))

        def inside(part: Any) -> str:
            return self._text(part, owner, seen)

        def each(parts: Iterable[Any]) -> str:  # their `repr` would double the backslashes at every level
            return f"[{', '.join(map(inside, parts))}]"

        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device):
            return "device"  # each process has its own
        if isinstance(value, Enum):
            return f"{type_name(value)} {value.name}"
        if isinstance(value, Mapping):
            return f"{type_name(value)} {each(value.keys())} {each(value.values())} {self._fields(value, inside)}"
        if isinstance(value, (list, tuple, deque)):
            return f"{type_name(value)} {each(value)} {self._fields(value, inside)}"
        if isinstance(value, (set, frozenset)):
            return f"{type_name(value)} {', '.join(sorted(map(inside, value)))} {self._fields(value, inside)}"
        if type(value) is FunctionType:
            cells = each(content_of(cell) for cell in value.__closure__ or ())
            given = value.__defaults__, value.__kwdefaults__
            return f"{value.__module__}:{value.__qualname__} {hash_of(value.__code__)} {inside(given)} {cells}"
        if isinstance(value, MethodType):
            return f"{inside(value.__func__)} of {inside(value.__self__)}"
        if isinstance(value, functools.partial):
            return f"partial {inside(value.func)} {inside(value.args)} {inside(value.keywords)}"
        if isinstance(value, CACHED):
            return f"cached {inside(value.__wrapped__)}"
        if isinstance(value, BuiltinFunctionType):
            return builtin_name(value)
        if isinstance(value, type):
            return type_name(value)
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, nn.Module):  # in no list of modules
            return f"{self.module(self._at, value, seen)} {inside(children_of(value))}"
        return f"{type_name(value)} {inside(_content(value))}"

    def _fields(self, value: Any, inside: Callable[[Any], str]) -> str:
        """Return a text for the fields of a container of another class than Python's."""
        return "" if in_library(type(value).__module__) else inside(fields_of(value))

    def _noted(self, module: nn.Module, name: str) -> torch.dtype | None:
        """Return the dtype in which the model computes with a weight that DynamicVRAM keeps as in the file until then."""
        noted: torch.dtype | None = getattr(module, f"{name}_comfy_model_dtype", None)
        return noted if is_dynamic(self._model) else None

    def _tensor(self, value: Tensor) -> str:
        self._note_content(value)
        return _format(value)

    def _note_content(self, value: Tensor) -> None:
        if value.device.type == "cpu" and not is_lazy(value):
            dense = value if value.layout is torch.strided else value.to_dense()
            content, before = sample(dense.contiguous()), self.contents.get(self._at)
            self.contents[self._at] = content if before is None else f"{before}|{content}"


def _content(value: Any) -> Any:
    """Return the fields of an object; of an object of a library what pickle would take of it, None of torch's: they are handles."""
    if not in_library(type(value).__module__):
        return fields_of(value)
    if is_computing(type(value).__module__):
        return None
    try:
        reduced = value.__reduce_ex__(4)
    except TypeError:  # such as a lock
        return None
    return reduced if isinstance(reduced, str) else [list(part) if isinstance(part, Iterator) else part for part in reduced[1:]]


def _format(value: Tensor, noted: torch.dtype | None = None) -> str:
    """Return dtype and shape of a tensor, and how it is stored where that is another class's matter. `noted`: see `_noted`."""
    if is_lazy(value):
        return f"{value.dtype}, without a shape"
    quantised = hasattr(value, "__tensor_flatten__") or is_plain_storage_subclass(value)
    stored_as = None if value.is_floating_point() else getattr(value, "tensor_type", None)
    named = getattr(value, "layout_cls", None) or stored_as or ""
    dtypes = dict.fromkeys(map(str, filter(None, (noted, value.dtype))))
    return f"{'/'.join(dtypes)} {list(value.shape)} {named if quantised else ''}".rstrip()


def _may_be_one(one: str | None, other: str | None) -> bool:
    """Return whether two formats are of one weight, in the dtype of the file or in that of the model: see `_noted`."""
    (dtypes, _, rest), (others, _, other_rest) = ((text or "").partition(" ") for text in (one, other))
    return rest == other_rest and not {*dtypes.split("/")}.isdisjoint(others.split("/"))


def is_ours(value: Any) -> bool:
    """Return whether a value stands in a model because this pack has put it there: see `ui.interception`."""
    return bool(getattr(type(value), "sends_to_workers", False))


def without_later(network: nn.Module, state: State) -> State:
    """Return a state without the attributes that the classes' own code sets after the constructor, such as caches."""
    classes: dict[str, Any] = {path: type(module) for path, module in network.named_modules(remove_duplicate=False)}
    later = {path: set_later(cls) for path, cls in classes.items()}
    held = {path: {k: v for k, v in each.items() if k not in later.get(path, ())} for path, each in state.held.items()}
    names = {f"{path}.{name}".lstrip(".") for path, found in later.items() for name in found}
    return State(held, {name: content for name, content in state.contents.items() if name not in names})
