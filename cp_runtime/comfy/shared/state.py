"""What the instances of a network's modules hold, as paths and hashes, made by the same function in ComfyUI's process and on every
rank. Ranks load the file by themselves: a node that sets an attribute of a layer, a field of an object that it holds, a method of
one instance, a layer in another's place, a hook or a buffer changes the network of ComfyUI's process only.

Weights count by dtype and shape; `weights` compares their numbers.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...compat import children_of, global_hooks, hooks_of, slots
from ...nested import is_plain_storage_subclass
from .fingerprint import PLAIN, builtin_name, content_of, digest, hash_of, in_library, names_in, type_name
from .modules import BOOKKEEPING, STANDARD
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
                stock = getattr(cls, name, None) if isinstance(value, MethodType) else None
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
        if isinstance(value, PLAIN):
            return f"{type(value).__name__} {value!r}"
        if value is owner:
            return "the module"
        if id(value) in self._paths:
            return f"module {self._paths[id(value)]}"
        if id(value) in seen:
            return "again"
        seen = (*seen, id(value))

        def inside(part: Any) -> str:
            return self._text(part, owner, seen)

        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device):
            return "device"  # each process has its own
        if isinstance(value, Enum):
            return f"{type_name(value)} {value.name}"
        if isinstance(value, Mapping):
            return f"{type_name(value)} {[(inside(key), inside(item)) for key, item in value.items()]}"
        if isinstance(value, (list, tuple)):
            return f"{type_name(value)} {[inside(item) for item in value]}"
        if isinstance(value, (set, frozenset)):
            return f"{type_name(value)} {sorted(map(inside, value))}"
        if isinstance(value, FunctionType):
            cells = [inside(content_of(cell)) for cell in value.__closure__ or ()]
            return f"{value.__module__}:{value.__qualname__} {hash_of(value.__code__)} {inside(value.__defaults__)} {cells}"
        if isinstance(value, MethodType):
            return f"{inside(value.__func__)} of {inside(value.__self__)}"
        if isinstance(value, functools.partial):
            return f"partial {inside(value.func)} {inside(value.args)} {inside(value.keywords)}"
        if isinstance(value, BuiltinFunctionType):
            return builtin_name(value)
        if isinstance(value, type):
            return type_name(value)
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, nn.Module):  # in no list of modules
            return f"{self.module(self._at, value, seen)} {[(name, inside(child)) for name, child in children_of(value).items()]}"
        if in_library(type(value).__module__):
            return type_name(value)
        return f"{type_name(value)} {inside(getattr(value, '__dict__', {}))}"

    def _noted(self, module: nn.Module, name: str) -> torch.dtype | None:
        """Return the dtype in which the model computes with a weight that DynamicVRAM keeps as in the file until then."""
        noted: torch.dtype | None = getattr(module, f"{name}_comfy_model_dtype", None)
        return noted if is_dynamic(self._model) else None

    def _tensor(self, value: Tensor) -> str:
        self._note_content(value)
        return _format(value)

    def _note_content(self, value: Tensor) -> None:
        if value.device.type == "cpu" and value.layout is torch.strided:
            before = self.contents.get(self._at)
            self.contents[self._at] = sample(value) if before is None else f"{before}|{sample(value)}"


def _format(value: Tensor, noted: torch.dtype | None = None) -> str:
    """Return dtype and shape of a tensor, and how it is stored where that is another class's matter. `noted`: see `_noted`."""
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
    later = {path: _set_later(cls) for path, cls in classes.items()}
    held = {path: {k: v for k, v in each.items() if k not in later.get(path, ())} for path, each in state.held.items()}
    names = {f"{path}.{name}".lstrip(".") for path, found in later.items() for name in found}
    return State(held, {name: content for name, content in state.contents.items() if name not in names})


@functools.cache
def _set_later(cls: Any) -> frozenset[str]:
    """Return names that methods of a class assign, other than its constructor and what only that one calls."""
    methods: dict[str, list[CodeType]] = {}
    for base in cls.__mro__:
        if not in_library(base.__module__):
            for name, value in vars(base).items():
                methods.setdefault(name, []).extend(_codes(value))
    uses = {name: frozenset[str]().union(*map(names_in, bodies)) for name, bodies in methods.items()}
    first, more = {"__init__"}, {"__init__"}
    while more := uses.keys() & frozenset[str]().union(*(uses.get(name, ()) for name in more)) - first:
        first |= more
    while shared := {name for name in first - {"__init__"} if any(name in uses[each] for each in uses.keys() - first)}:
        first -= shared
    return frozenset[str]().union(*(_assigned(body) for name in methods.keys() - first for body in methods[name]))


def _codes(value: Any) -> Iterator[CodeType]:
    for each in (value, *(getattr(value, part, None) for part in ("__func__", "fget", "fset", "__wrapped__", "func"))):
        if isinstance(each, FunctionType):
            yield each.__code__


def _assigned(body: CodeType) -> set[str]:
    names = {str(each.argval) for each in dis.get_instructions(body) if each.opname == "STORE_ATTR"}
    return names.union(*map(_assigned, (each for each in body.co_consts if isinstance(each, CodeType))))
