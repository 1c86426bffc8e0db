"""Networks by value, for the ranks that this process has started: a pickle, with a number in the place of every tensor.

This process reads none: its children do (`rank.objects`). Classes and functions go by name, what a function has around it by
value, so no code travels: both processes compare what they have under these names (`fingerprint`). Left out are records of
ComfyUI's memory manager and this pack's own.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
import io
import operator
from collections.abc import Callable, Iterator, Mapping
from pickle import Pickler
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...compat import global_hooks, hooks_of
from ...errors import MirrorError
from ...nested import is_plain, is_plain_storage_subclass
from ...recent import Recent
from .assigned import set_later
from .fingerprint import CACHED, Code, alone, bodies_in, code_of, content_of, fields_of, found
from .made import (
    HOOKS,
    MAKERS,
    bind_method,
    build_class,
    fill_cell,
    fill_function,
    fill_module,
    make_cell,
    make_class,
    make_dressed,
    make_function,
    make_parameter,
    make_small,
    make_wrapped,
    new_module,
    own_device,
    set_fields,
)
from .modules import BOOKKEEPING, LOCALS, PACKS, find, full_name, module_name, modules_named, take_module, type_name
from .origin import in_library

INSIDE = frozenset({"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
"""The standard attributes of a module that count here."""
STANDARD = frozenset(vars(nn.Module()))
_CODE = (FunctionType, MethodType, functools.partial)
ABSENT: Any = type("Absent", (), {})()
INLINE = 64 << 10
"""Bytes: smaller tensors, other than weights, are written with the rest."""


class Written(NamedTuple):
    """A network, or anything else, as it travels.

    Args:
        data: for `rank.objects.read`.
        tensors: plain ones, by their number; small ones, other than weights, are in `data`.
        owners: the tensor or weight that each of these is the memory of.
        classes: of its modules.
        code: other classes and functions of ComfyUI and node packs that it names, by these names.
    """

    data: bytes
    tensors: list[Tensor]
    owners: list[Tensor]
    classes: frozenset[type]
    code: Mapping[str, Any]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.code)

    @property
    def all_code(self) -> dict[str, Any]:
        """Code by name, with the classes of modules. For a class that a function makes, `code` has that function."""
        return {**self.code, **{name: cls for cls in self.classes if LOCALS not in (name := full_name(cls))}}

    @property
    def leaves(self) -> list[Tensor]:
        """All of it as tensors, for `rank.objects.read_leaves`."""
        return [torch.frombuffer(bytearray(self.data), dtype=torch.uint8), *self.tensors]


class Settings(NamedTuple):
    """How a thing is written.

    Args:
        later: also what the classes' own code sets after the constructor, such as caches, where that can be sent; without, two
            results differ only by what others have changed.
        marks: further attributes of a module, for the ranks.
        instead: weights to be written in the place of others, by the id of these.
        originals: attributes of modules as they were before they were patched, or ABSENT, by the id of the module.
        refer: returns plain data for what a rank has otherwise, a tuple; None for all else.
        methods: methods of single modules and hooks travel as well: all of the model's tokens pass through them.
        without: attributes of objects that a rank does not need, and finds as None, by the name of their class.
        devices: also where tensors lie; without, what was moved is written alike.
    """

    later: bool = True
    marks: Callable[[nn.Module], Mapping[str, Any]] = lambda module: {}
    instead: Mapping[int, Tensor] = MappingProxyType({})
    originals: Mapping[int, Mapping[str, Any]] = MappingProxyType({})
    refer: Callable[[Any], Any] | None = None
    methods: bool = False
    without: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    devices: bool = True


_USUAL = Settings()


def write(thing: Any, settings: Settings = _USUAL) -> Written:
    """Write a thing. Raises MirrorError, which names the part that cannot be sent."""
    if any(not is_ours(hook) for each in global_hooks() for hook in each.values()):
        raise MirrorError("a node put a hook on the forward of all modules, which the workers lack")
    try:
        return _written(thing, settings)
    except _Refused as error:
        raise MirrorError(error.what.format(path=_path_of(thing, error.module))) from error
    except MirrorError:
        raise
    except Exception as error:
        raise MirrorError(f"{_culprit(thing, settings)} cannot be sent to the workers ({_shortened(error)})") from error


class _Refused(Exception):
    """What a module has may not travel. `what`: says so, with "{path}" in the place of the module's."""

    def __init__(self, what: str, module: nn.Module) -> None:
        super().__init__(what)
        self.what, self.module = what, module


def _written(thing: Any, settings: Settings) -> Written:
    file = io.BytesIO()
    writer = _Writer(file, settings)
    writer.dump(thing)
    for cls in writer.classes:
        writer.code.pop(full_name(cls), None)
    return Written(file.getvalue(), writer.tensors, writer.owners, frozenset(writer.classes), writer.code)


def _modules(thing: Any) -> Iterator[tuple[str, nn.Module]]:
    parts = thing if isinstance(thing, tuple) else (thing,)
    return (named for part in parts if isinstance(part, nn.Module) for named in part.named_modules())


def _path_of(thing: Any, module: nn.Module) -> str:
    return next((path for path, each in _modules(thing) if each is module and path), "the model")


def _culprit(thing: Any, settings: Settings) -> str:
    """Describe the part that cannot be written."""
    for path, module in _modules(thing):
        for name, value in _attributes(module, settings).items():
            if name not in INSIDE and not _can_be_sent(value, settings):
                return f"{name} of {path or 'the model'}, {_article(_inside(value, settings))},"
    return _article(_inside(thing, settings))


def _inside(thing: Any, settings: Settings, depth: int = 8) -> Any:
    """Return the innermost value in containers and fields because of which a thing cannot be written."""
    kind = type(thing)  # `isinstance` believes what an object says of itself
    if issubclass(kind, dict):
        parts = list(thing.values())
    else:
        parts = list(thing if issubclass(kind, (list, tuple)) else fields_of(thing).values())
    bad = [each for each in parts if not _can_be_sent(each, settings)] if depth else []
    return _inside(bad[0], settings, depth - 1) if bad else thing


def _article(value: Any) -> str:
    return f"an object of the class {type_name(type(value))}"


def _shortened(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _attributes(module: nn.Module, settings: Settings) -> dict[str, Any]:
    """Return the attributes of a module that count."""
    cls: Any = type(module)
    later = set_later(cls)
    held: dict[str, Any] = {}
    for name, value in _as_before(module, settings.originals.get(id(module), {})).items():
        if (name in STANDARD and name not in INSIDE) or BOOKKEEPING.fullmatch(name) or is_ours(value):
            continue
        if name in later and not (settings.later and _can_be_sent(value, settings)):
            continue  # caches: ranks make their own
        if type(value) is MethodType and value.__self__ is module and value.__func__ is getattr(type(module), name, None):
            continue  # ComfyUI leaves the stock method after a patch
        held[name] = value
    return held


def _can_be_sent(value: Any, settings: Settings) -> bool:
    try:
        _written(value, settings)
    except Exception:  # noqa: BLE001  (it may raise anything when it is looked at)
        return False
    return True


def _as_before(module: nn.Module, originals: Mapping[str, Any]) -> dict[str, Any]:
    if not originals:
        return vars(module)
    held = {**vars(module), **{name: dict(vars(module)[name]) for name in ("_parameters", "_buffers", "_modules")}}
    for name, value in originals.items():
        inner = next((held[each] for each in ("_parameters", "_buffers", "_modules") if name in held[each]), held)
        if value is ABSENT:
            inner.pop(name, None)
        else:
            inner[name] = value
    return held


def is_ours(value: Any) -> bool:
    """Return whether this pack has put a value into a model: see `ui.interception`."""
    return bool(getattr(type(value), "sends_to_workers", False))


class _Writer(Pickler):
    def __init__(self, file: io.BytesIO, settings: Settings) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self.owners: list[Tensor] = []
        self.classes: set[type] = set()
        self.code: dict[str, Any] = {}
        self._settings = settings
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if self._settings.refer is not None and (reference := self._settings.refer(value)) is not None:
            return reference
        if not is_plain(value) or value.layout is not torch.strided or is_lazy(value) or value.is_quantized:
            return None
        if id(value) not in self._numbers:
            if value.nbytes <= INLINE:
                return None  # `_tensor` writes its numbers; those of weights always have a number here
            self._number(value, value)
        return self._numbers[id(value)]

    def _number(self, value: Tensor, owner: Tensor) -> Tensor:
        self._numbers[id(value)] = len(self.tensors)
        self.tensors.append(value)
        self.owners.append(owner)
        return value

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._of_module(value)
        kind = type(value)  # `isinstance` believes what an object says of itself
        if kind is FunctionType:
            return self._function(value)
        if issubclass(kind, type):
            return self._class(value)
        if kind is MethodType:
            return bind_method, (value.__func__, value.__self__)
        if kind is CellType:  # functions may share one
            return make_cell, (), (content_of(value),), None, None, fill_cell
        if kind is CACHED:
            return self._by_name(value, value.__wrapped__)
        if kind is torch.device:
            return own_device, (value.type if self._settings.devices else "",)
        if kind is object:
            raise MirrorError("an object() that code compares by identity cannot be sent to the workers")
        if issubclass(kind, ModuleType):
            return take_module, (module_name(value.__name__),)
        if self._settings.without and (left_out := self._settings.without.get(full_name(kind))):
            return copyreg.__newobj__, (kind,), {**vars(value), **dict.fromkeys(left_out)}  # type: ignore[attr-defined]
        return NotImplemented

    def _tensor(self, value: Tensor) -> Any:
        value = self._settings.instead.get(id(value), value)
        if value.is_quantized:
            raise MirrorError("a tensor that torch has quantised cannot be sent to the workers")
        parameter = isinstance(value, nn.Parameter)
        if hasattr(type(value), "__tensor_flatten__"):
            inner, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = {name: getattr(value, name) for name in inner}
            if parameter:
                parts = {name: self._number(part, part) if is_plain(part) else part for name, part in parts.items()}
            return make_wrapped, (type(value), parts, context, tuple(value.shape), value.stride(), parameter, value.requires_grad)
        if is_plain_storage_subclass(value):
            memory = self._number(value.as_subclass(Tensor).detach(), value)
            return make_dressed, (type(value), memory, parameter, value.requires_grad), vars(value), None, None, set_fields
        if value.layout is not torch.strided or is_lazy(value):
            return NotImplemented
        if parameter and type(value) in (Tensor, nn.Parameter):
            return make_parameter, (self._number(value.detach(), value), value.requires_grad)
        if is_plain(value):  # a small one
            numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return make_small, (numbers, value.dtype, tuple(value.shape), value.device)
        return NotImplemented

    def _of_module(self, module: nn.Module) -> Any:
        for hook in (hook for each in hooks_of(module) for hook in each.values()):
            if not (self._settings.methods or is_ours(hook) or _of_library(hook)):
                raise _Refused("a node put a hook on {path}", module)
        if module.training and any(is_random(name, value) for name, value in vars(module).items()):
            raise _Refused("a node put {path} into training mode, which draws random numbers", module)
        try:
            self._class(type(module))
        except MirrorError as error:
            raise _Refused(f"a node replaced the class of {{path}}: {error}", module) from error
        self.classes.add(type(module))
        held = _attributes(module, self._settings)
        for name, value in held.items():
            if type(value) in _CODE and hasattr(type(module), name) and not self._settings.methods:
                raise _Refused(f"a node replaced {name} of {{path}}", module)
        hooks = {name: {k: hook for k, hook in vars(module)[name].items() if not is_ours(hook)} for name in HOOKS}
        return new_module, (type(module),), {**held, **hooks, **self._settings.marks(module)}, None, None, fill_module

    def _function(self, function: FunctionType) -> Any:
        if MAKERS.get(function.__name__) is function:
            return NotImplemented
        name, wraps = full_name(function), "__wrapped__" in vars(function)
        if wraps and function not in _resolved(name):
            name = _made_at(function)
        if LOCALS not in name:
            return self._by_name(function, function)
        outer, _, inner = name.partition(LOCALS)
        bodies, _ = bodies_in(outer, inner)
        number = next((number for number, body in enumerate(bodies) if body == function.__code__), None)
        if number is None:
            raise MirrorError(f"{name.replace(':', '.')} is not to be found where it was made, and no code is sent to the workers")
        if not in_library(outer.partition(":")[0]):
            self.code.update({name: alone(function)} if len(bodies) == 1 else {outer: found(outer)})
        called = (module_name(function.__module__), function.__name__, function.__qualname__) if wraps else ()
        return (
            make_function,
            (outer, inner, number),
            (function.__defaults__, function.__kwdefaults__, function.__closure__ or (), vars(function), called),
            None,
            None,
            fill_function,
        )

    def _class(self, cls: Any) -> Any:
        if cls.__module__ == "builtins":
            return NotImplemented
        return self._remade(cls) if LOCALS in cls.__qualname__ else self._by_name(cls, cls)

    def _by_name(self, thing: Any, named: Any) -> Any:
        """Refer to a thing by name. Raises MirrorError: something else has that name here."""
        name = full_name(named)
        found_here = [getattr(each, "__func__", each) for each in _resolved(name)]
        if not any(each == getattr(thing, "__func__", thing) for each in found_here):
            raise MirrorError(f"{name.replace(':', '.')} is not to be found under its name, and no code is sent to the workers")
        if name.startswith(PACKS) and len(found_here) > 1:
            raise MirrorError(f"two node packs have the module {name.partition(':')[0]}. Rename the folder of one")
        if not in_library(str(named.__module__)):
            self.code[name] = named
        return find, (name,)

    def _remade(self, cls: Any) -> Any:
        """Have the rank make a class that a function has made: from its body, or by that function where the body uses variables of
        it."""
        known = _remade.get(cls)
        if known is None or not known[1].holds():
            known = _remade[cls] = _making(cls)
        make, _ = known
        self.code[make[1][0]] = found(make[1][0])
        return make


def _made_at(function: FunctionType) -> str:
    """Return `full_name` by the code of a function that has taken the name of the one that it wraps."""
    own = getattr(function.__code__, "co_qualname", function.__qualname__)  # from Python 3.11 on
    return f"{module_name(str(function.__globals__.get('__name__')))}:{own}"


def is_random(name: str, value: Any) -> bool:
    """Return whether an attribute is the probability of a dropout."""
    return (name == "p" or "drop" in name) and type(value) in (int, float) and value > 0


def _of_library(hook: Any) -> bool:
    """Return whether a hook is a library's, such as those of weight norms."""
    return in_library(str(hook.__module__ if type(hook) in _CODE else type(hook).__module__))


Making = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of `made.MAKERS`, and its arguments, of which the first is the name of a function."""
CLASSES = 64
_remade: Recent[type, tuple[Making, Code]] = Recent(CLASSES)
"""Classes that functions have made: how ranks make them, and their code, as long as that holds. The code refers to them, so
only the last ones are kept."""


def _making(cls: Any) -> tuple[Making, Code]:
    """Return how ranks make a class, and its code. Raises MirrorError: it would be another one."""
    outer, _, inner = full_name(cls).partition(LOCALS)
    bodies, _ = bodies_in(outer, inner)
    if len(bodies) == 1 and not bodies[0].co_freevars and type(cls) is type:
        make: Making = build_class, (outer, inner, cls.__bases__)
    else:
        make = make_class, _arguments(cls)
    # Made here as a rank will make it: a class that was changed since would come out otherwise.
    shown = full_name(cls).replace(":", ".")
    try:
        remade = make[0](*make[1])
    except Exception as error:
        raise MirrorError(f"{shown} is a class that the workers cannot make: {error}") from error
    ours = code_of((cls,))
    bases = [[each.__qualname__ for each in made.__mro__] for made in (cls, remade) if isinstance(made, type)]
    if len(bases) < 2 or bases[0] != bases[1] or ours.hashes != code_of((remade,)).hashes:
        raise MirrorError(f"{shown} is a class that the workers would make otherwise: it was changed after it was made")
    return make, ours


def _arguments(cls: Any) -> tuple[str, dict[str, Any], str]:
    """Return the name of the function that has made a class, its arguments, and the path of the class in what it makes.

    Arguments are known from what methods refer to, and from attributes `_name`.
    """
    outer, _, path = cls.__qualname__.partition(LOCALS)
    factory = next(_resolved(f"{module_name(cls.__module__)}:{outer}"), None)
    if not isinstance(factory, FunctionType):
        shown = full_name(cls).replace(":", ".")
        raise MirrorError(f"{shown} is a class that no function at the top of a module has made, and the workers lack it")
    wanted = inspect.signature(factory).parameters
    held: dict[str, Any] = {}
    for function in _methods_made_with(cls):
        held |= dict(zip(function.__code__.co_freevars, map(content_of, function.__closure__ or ()), strict=True))
    top = f"{LOCALS}{path.partition('.')[0]}"
    for each in (cls, *(each for each in held.values() if isinstance(each, type) and each.__qualname__.endswith(top))):
        held = {**{name: vars(each)[f"_{name}"] for name in wanted if f"_{name}" in vars(each)}, **held}
    return full_name(factory), {name: held[name] for name in wanted if name in held}, path


def _methods_made_with(cls: Any) -> Iterator[FunctionType]:
    for base in cls.__mro__:
        for value in vars(base).values():
            if isinstance(value, FunctionType) and value.__closure__ and LOCALS in value.__qualname__:
                yield value


def _resolved(name: str) -> Iterator[Any]:
    """Yield the things of a name in this process."""
    module, _, path = name.partition(":")
    for thing in modules_named(module):
        with contextlib.suppress(AttributeError):
            yield operator.attrgetter(path)(thing)
