"""What a network computes with, as names and hashes, made by the same function in ComfyUI's process and on every rank: where these
are equal, both compute the same.

*Code*: the classes of a network's modules, and what their methods use by name, transitively: functions, classes and constants of
ComfyUI and of node packs. Of libraries every function that is used, without what it uses itself; of torch's modules one level more,
`F.gelu` behind `nn.GELU`. Nothing is compared with files: code counts as it is in memory.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from enum import Enum
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MirrorError
from .assigned import assigned, filled, names_in, set_later
from .modules import LOADER_SETTINGS, LOCALS, PACKS, find, full_name, module_name, type_name
from .origin import file_of, in_library, is_computing, is_followed

# They decide where weights lie and which code surrounds the forward in ComfyUI's process; ranks have other devices and duties.
_ELSEWHERE = """
    cli_args memory_management model_management model_patcher model_prefetch options patcher_extension pinned_memory
"""
ELSEWHERE = frozenset(f"comfy.{name}" for name in _ELSEWHERE.split())
OF_SERVER = frozenset({("comfy.utils", "PROGRESS_BAR_HOOK"), ("comfy.utils", "PROGRESS_BAR_ENABLED")})  # and ranks have none
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
NAMESPACES = (SimpleNamespace, Namespace)
SETTINGS = (*PLAIN, Enum, dict, list, set, *NAMESPACES)
ENTRIES = "[]"  # in place of a name: what is in a container
FEW, NESTED = 256, 4  # settings in a container that are looked at before calls, and containers inside of each other
CACHED = type(functools.lru_cache(len))
_BUILTIN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, GetSetDescriptorType)
_CODE = (FunctionType, MethodType, functools.partial, type)
# Bookkeeping of Python on a class.
_NO_CODE = frozenset({
    "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__abstractmethods__", "_abc_impl",
    "__static_attributes__", "__firstlineno__", "__parameters__", "__orig_bases__", "__slots__", "__match_args__", "__hash__",
    "__slotnames__",
    "__annotate__", "__annotations_cache__",
})  # fmt: skip
PLACES = frozenset({"__file__", "__path__", "__spec__", "__loader__", "__cached__"})
"""Attributes of modules that say where their code is: another computer has it in another folder."""
# They run when a model is made or copied: what came of it is in its state. torch.compile puts its own in the place of some.
_UNUSED = frozenset({
    "__init__", "__new__", "__setstate__", "__getstate__", "__reduce__", "__reduce_ex__", "__repr__", "__dir__", "__delattr__",
})  # fmt: skip
_ABSENT = object()
Key = tuple[int | str, str]
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Code:
    """The code of some classes and functions, and of all that they use.

    Args:
        hashes: by name, `module:name` of what a module binds, `module:Class.name` of what a class does.
        files: of Python code under these names.
    """

    hashes: Mapping[str, str]
    files: Mapping[str, str]
    _held: list[tuple[Mapping[str, Any], str, Any]] = field(repr=False)
    _functions: list[tuple[FunctionType, CodeType, Any, Any]] = field(repr=False)
    _cells: list[tuple[CellType, Any]] = field(repr=False)
    _sizes: list[tuple[Sized, int]] = field(repr=False)

    def holds(self) -> bool:
        """Return whether every name still has the value that it had. It takes some 50 µs, for use before every call."""
        for owner, name, value in self._held:  # a generator would take four times as long
            if owner.get(name, _ABSENT) is not value:
                return False
        for function, body, defaults, by_name in self._functions:
            if function.__code__ is not body or function.__defaults__ is not defaults or function.__kwdefaults__ is not by_name:
                return False
        for cell, value in self._cells:
            if content_of(cell) is not value:
                return False
        # A new name in a class may hide one of its bases; a setting may be new.
        for container, size in self._sizes:  # noqa: SIM110
            if len(container) != size:
                return False
        return True


def code_of(classes: Iterable[type] = (), roots: Mapping[str, Any] = NOTHING) -> Code:
    """Return the code of classes, and of further classes and functions by name, and of all that they use."""
    roots = {**{full_name(cls): cls for cls in classes}, **roots}
    # What the found code assigns is passed over; then other code is found, until nothing more is assigned.
    walk = _Walk(roots, frozenset())
    while not (passed_over := walk.assigned()) <= walk.passed_over:
        walk = _Walk(roots, walk.passed_over | passed_over)
    return walk.code


def found(name: str) -> Any:
    """Return a class or function at the top of a module or a class, by `full_name`, or what `alone` makes of one inside of such a
    function. Raises MirrorError: it is not here."""
    outer, _, inner = name.partition(LOCALS)
    try:
        thing = find(outer)
    except (ImportError, AttributeError) as error:
        why = "" if isinstance(error, AttributeError) else f": {error}"  # that one has the folder, and says no more
        raise MirrorError(f"there is no {name.replace(':', '.')}{why}") from error
    if not inner:
        return thing
    bodies, namespace = bodies_in(outer, inner)
    if len(bodies) != 1:
        raise MirrorError(f"there is no {name}, or more than one")
    return bare(bodies[0], namespace)


def bodies_in(outer: str, inner: str) -> tuple[list[CodeType], dict[str, Any]]:
    """Return the code of the functions and classes of that name inside of a function, and its globals; none, where that is no
    function. Raises MirrorError: it is not here."""
    thing = found(outer)
    around = inspect.unwrap(getattr(thing, "__func__", thing))
    if not isinstance(around, FunctionType):
        return [], {}
    bodies = [around.__code__]
    for name in inner.replace(LOCALS, ".").split("."):
        bodies = [each for body in bodies for each in body.co_consts if isinstance(each, CodeType) and each.co_name == name]
    return bodies, around.__globals__


def alone(function: FunctionType) -> FunctionType:
    """Return a function of another function without the variables that it has from there, and without defaults."""
    return bare(function.__code__, function.__globals__)


def bare(body: CodeType, namespace: dict[str, Any]) -> FunctionType:
    """Return a function of a body, without defaults and with nothing in its variables from around."""
    return FunctionType(body, namespace, body.co_name, None, tuple(CellType() for _ in body.co_freevars))


def classes_of(network: nn.Module) -> frozenset[type]:
    return frozenset(type(module) for module in network.modules())


def digest_of(hashes: Mapping[str, Any]) -> str:
    """Return a hash of hashes by name, in which their order does not count."""
    return digest(
        repr(sorted((name, sorted(held.items()) if isinstance(held, Mapping) else held) for name, held in hashes.items()))
    )


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names under which two sides have something else, in order."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


class _Walk:
    """A walk through code from some roots. What is found under a name does not depend on the order of the visits: the hashes there
    are a set.

    Args:
        passed_over: names of globals and of constants of classes that the code found here assigns by itself, with the id of their
            namespace or class, and `ENTRIES` with the id of a container that it fills.
    """

    def __init__(self, roots: Mapping[str, Any], passed_over: frozenset[Key]) -> None:
        self.passed_over = passed_over
        self._found: dict[str, set[str]] = {}
        self._files: dict[str, str] = {}
        self._held: list[tuple[Mapping[str, Any], str, Any]] = []
        self._functions: list[tuple[FunctionType, CodeType, Any, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._sizes: list[tuple[Sized, int]] = [(vars(Tensor), len(vars(Tensor)))]
        self._seen: set[Key] = set()
        self._assigned: set[Key] = set()
        self._done: set[Any] = set()
        self._left: list[Callable[[], None]] = []
        for name, root in roots.items():
            self._value(name, root)
        while self._left:
            self._left.pop()()
        hashes = {name: digest("".join(sorted(found))) for name, found in self._found.items()}
        self.code = Code(hashes, self._files, self._held, self._functions, self._cells, self._sizes)

    def assigned(self) -> frozenset[Key]:
        """Return further names to pass over."""
        return frozenset(self._assigned & self._seen)

    def _note(self, name: str, text: str, file: str = "") -> None:
        self._found.setdefault(name, set()).add(text)
        if file:
            self._files[name] = file

    def _value(self, name: str, value: Any) -> None:
        try:
            self._readable(name, value)
        except Exception as error:  # noqa: BLE001  (an object of a pack may raise anything when it is looked at)
            self._note(name, f"unreadable, {type(error).__name__}")

    def _readable(self, name: str, value: Any) -> None:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if type(value) is FunctionType:  # `isinstance` believes what an object says of itself
            self._function(name, value)
        elif isinstance(value, property):
            for part in ("fget", "fset", "fdel"):
                if (function := getattr(value, part)) is not None:
                    self._value(f"{name}.{part}", function)
        elif isinstance(value, MethodType):
            self._value(name, value.__func__)
            self._value(f"{name}.__self__", value.__self__)
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            self._value(f"{name}.func", value.func)
            self._several(f"{name}.args", (*value.args, *sorted(value.keywords.items())))
        elif isinstance(value, functools.cached_property):
            self._value(f"{name}.func", value.func)
        elif isinstance(value, CACHED):
            self._note(name, "cached")
            self._value(f"{name}.__wrapped__", value.__wrapped__)
        elif isinstance(value, type):
            self._class(name, value)
        elif isinstance(value, PLAIN):
            self._note(name, plain_text(value))
        elif isinstance(value, _BUILTIN):
            self._note(name, builtin_name(value))
        elif isinstance(value, (tuple, list, set, frozenset, dict)):
            self._several(name, value)
        elif isinstance(value, Tensor):
            self._note(name, f"tensor {value.dtype} {list(value.shape)}")
        elif not isinstance(value, ModuleType):
            self._object(name, value)

    def _object(self, name: str, value: Any) -> None:
        """Note an object: its class, and of its fields constants and code."""
        cls: Any = type(value)
        if cls in NAMESPACES and name.startswith(PACKS):
            self._several(name, vars(value))
        self._note(name, f"instance of {type_name(cls)}")
        if in_library(str(cls.__module__)) or cls.__module__ in ELSEWHERE:
            return
        self._class(f"{name}.__class__", cls)
        fields = {} if isinstance(value, nn.Module) else fields_of(value)  # those of modules are `state`'s matter
        for attribute in fields.keys() - set_later(cls):
            held = fields[attribute]
            if isinstance(held, (*PLAIN, *_CODE, tuple)):
                self._held.append((fields, attribute, held))
                self._value(f"{name}.{attribute}", held)

    def _several(self, name: str, values: Any) -> None:
        """Note containers: those that do not change whole; of others, which may be caches, the functions and classes inside. Of a
        pack's, which may be settings of its nodes, constants, too, unless the found code fills them; and of its globals further
        containers."""
        whole, place = isinstance(values, (tuple, frozenset)), (id(values), ENTRIES)
        of_pack = not whole and name.startswith(PACKS) and place not in self.passed_over
        settings = of_pack and "<" not in name and name.count("[") < NESTED
        kinds: tuple[type, ...] = SETTINGS if settings else PLAIN if of_pack else ()
        if settings and place not in self._done:
            self._done.add(place)
            self._seen.add(place)
            if len(values) <= FEW:
                self._sizes.append((values, len(values)))
                entries = values.items() if isinstance(values, dict) else ()
                self._held += [(values, each, value) for each, value in entries if isinstance(value, kinds)]
        if isinstance(values, dict):
            items = [(repr(key), value) for key, value in values.items() if isinstance(key, (*PLAIN, Enum))]
        elif isinstance(values, (set, frozenset)):
            items = [("", value) for value in values]
        else:
            items = [(str(index), value) for index, value in enumerate(values)]
        for key, value in items:
            if whole or isinstance(value, (*_CODE, tuple, *kinds)):
                self._value(f"{name}[{key}]", value)

    # --- functions --------------------------------------------------------------------------------------------------------

    def _function(self, name: str, function: FunctionType, further: bool = False) -> None:
        """Note a function. `further`: follow its names, although it is of a library."""
        body, module = function.__code__, module_name(str(function.__globals__.get("__name__", "")))
        self._note(name, f"{hash_of(body)} {_defaults(function)}", body.co_filename)
        follows, root = not in_library(module), name.partition("<")[0]
        if (id(function), root) not in self._done:  # of two wrappers from one place each has its own closure
            self._done.add((id(function), root))
            self._around(root, function, follows)
        if (id(function), further) in self._done:
            return
        self._done.add((id(function), further))
        self._functions.append((function, body, function.__defaults__, function.__kwdefaults__))
        if follows:
            self._attributes(function)
        if module in ELSEWHERE:
            return
        if follows:
            self._note_assigned(function, module)
            self._left.append(functools.partial(self._names, function.__globals__, names_in(body)))
        elif further:
            self._left.append(functools.partial(self._names_of_library, function.__globals__, names_in(body)))

    def _attributes(self, function: FunctionType) -> None:
        """Note constants that somebody has set on a function: those that no code sets itself, as counters are. Under its own name:
        which of its other names is found first depends on the order of the visits."""
        held, name = vars(function), full_name(function)
        self._sizes.append((held, len(held)))
        for attribute in held.keys() - assigned(function.__code__, "STORE_ATTR"):
            if isinstance(held[attribute], PLAIN):
                self._held.append((held, attribute, held[attribute]))
                self._note(f"{name}.{attribute}", plain_text(held[attribute]), function.__code__.co_filename)

    def _around(self, root: str, function: FunctionType, follows: bool) -> None:
        """Note the closure and the defaults of a function. Deferred, since functions around functions may be many."""
        own, values = f"{root}<{full_name(function)}", {}
        counters = assigned(function.__code__, "STORE_DEREF")
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = content_of(cell)
            if variable not in counters and (follows or isinstance(value, _CODE)):
                self._cells.append((cell, value))
                values[f"{own} {variable}>"] = value
        by_name: dict[Any, Any] = {**dict(enumerate(function.__defaults__ or ())), **(function.__kwdefaults__ or {})}
        values |= {f"{own}={key}>": value for key, value in by_name.items() if not isinstance(value, PLAIN)}
        if "__wrapped__" in vars(function):
            values[f"{own}>.__wrapped__"] = vars(function)["__wrapped__"]
        self._left += [functools.partial(self._value, name, value) for name, value in values.items()]

    def _note_assigned(self, function: FunctionType, module: str) -> None:
        """Note which globals a function assigns, or fills in a pack, and which constants of classes that it uses by name."""
        body, namespace = function.__code__, function.__globals__
        self._assigned.update((id(namespace), name) for name in assigned(body, "STORE_GLOBAL"))
        if module.startswith(PACKS):
            self._assigned.update((id(namespace[name]), ENTRIES) for name in filled(body) & namespace.keys())
        if attributes := assigned(body, "STORE_ATTR"):
            classes = [namespace[name] for name in names_in(body) & namespace.keys() if issubclass(type(namespace[name]), type)]
            self._assigned.update((id(cls), name) for cls in classes for name in attributes)

    def _names(self, namespace: dict[str, Any], names: frozenset[str]) -> None:
        """Note the names that a function of ComfyUI or a pack uses."""
        module = module_name(str(namespace.get("__name__")))
        for name in names - PLACES:
            value = namespace.get(name, _ABSENT)
            if issubclass(type(value), ModuleType):
                self._of_module(value, names)
            elif value is not _ABSENT:
                self._bound(namespace, module, name, value)
            elif name in vars(Tensor) and name not in _NO_CODE:  # a method of tensors, maybe
                self._bound(vars(Tensor), "torch:Tensor", name, vars(Tensor)[name], ".")

    def _of_module(self, module: ModuleType, names: frozenset[str]) -> None:
        """Note the used members of a module, such as `torch.nn.functional.gelu`: all these names occur in one function."""
        key = (module.__name__, names)
        if key in self._done or module.__name__ in ELSEWHERE or not is_followed(module.__name__):
            return
        self._done.add(key)
        for name in names & vars(module).keys() - PLACES:
            value = vars(module)[name]
            if issubclass(type(value), ModuleType):
                self._of_module(value, names)
            else:
                self._bound(vars(module), module_name(module.__name__), name, value)

    def _bound(self, owner: Mapping[str, Any], module: str, name: str, value: Any, separator: str = ":") -> None:
        key = (id(owner) if isinstance(owner, dict) else module, name)  # a class gives a new view of its own every time
        if key in self._done or (module, name) in OF_SERVER or key in self.passed_over:
            return
        self._done.add(key)
        self._seen.add(key)
        self._held.append((owner, name, value))
        if not (issubclass(type(value), (FunctionType, type)) and str(value.__module__) in ELSEWHERE):
            self._value(f"{module}{separator}{name}", value)

    def _names_of_library(self, namespace: dict[str, Any], names: frozenset[str]) -> None:
        """Note the functions that a method of torch's modules uses."""
        module = module_name(str(namespace.get("__name__")))
        for name in names & namespace.keys():
            value = namespace[name]
            inner = names & vars(value).keys() if issubclass(type(value), ModuleType) and is_followed(value.__name__) else ()
            owner, where = (vars(value), value.__name__) if inner else (namespace, module)
            for each in inner or (name,):
                if isinstance(owner[each], (FunctionType, *_BUILTIN)):
                    self._bound(owner, where, each, owner[each])

    # --- classes ----------------------------------------------------------------------------------------------------------

    def _class(self, name: str, cls: type) -> None:
        self._note(name, f"class {type_name(cls)}", file_of(cls.__module__))
        if cls.__module__ in ELSEWHERE:
            return
        for base in cls.__mro__:
            if base in self._done or base.__module__ == "builtins" or base.__module__ in ELSEWHERE:
                continue
            self._done.add(base)
            library, own = in_library(base.__module__), vars(base)
            module = issubclass(base, nn.Module)
            if library and not module and not is_computing(base.__module__):
                continue
            self._sizes.append((own, len(own)))
            for attribute, value in list(own.items()):
                if attribute in _NO_CODE or attribute in LOADER_SETTINGS or (module and attribute in _UNUSED):
                    continue
                if library and (attribute in _UNUSED or not isinstance(value, (FunctionType, staticmethod, classmethod, property))):
                    continue
                if isinstance(value, PLAIN):
                    self._seen.add((id(base), attribute))
                    if (id(base), attribute) in self.passed_over:
                        continue
                self._held.append((own, attribute, value))
                where = f"{full_name(base)}.{attribute}"
                if library and module and isinstance(value, FunctionType):
                    self._function(where, value, further=True)
                else:
                    self._value(where, value)


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


@functools.lru_cache(maxsize=1 << 16)
def hash_of(body: CodeType) -> str:
    """Return a hash of a function's code, wherever it is from."""
    constants = [hash_of(each) if isinstance(each, CodeType) else _constant(each) for each in body.co_consts]
    # Without file and lines: another computer has it in another folder.
    parts = (body.co_code.hex(), constants, body.co_names, body.co_varnames, body.co_freevars, body.co_flags)
    return digest(repr(parts))


def _constant(value: Any) -> str:
    # The order of a set of strings differs from process to process.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _defaults(function: FunctionType) -> str:
    given = (function.__defaults__ or (), sorted((function.__kwdefaults__ or {}).items()))
    return repr([_default(value) for value in (*given[0], *given[1])])


def _default(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_default, value))})"
    return plain_text(value) if isinstance(value, PLAIN) else type_name(value)


def plain_text(value: Any) -> str:
    """Return a text for a constant. Python writes no more than 4,300 digits of an integer in decimals."""
    return f"{type(value).__name__} {value:x}" if type(value) is int else f"{type(value).__name__} {value!r}"


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of an object, whatever it answers when asked for them: the dict where they are, if it has no slots."""
    fields: dict[str, Any] = object.__getattribute__(value, "__dict__") if type(value).__dictoffset__ else {}
    slots = [each for base in type(value).__mro__ for each in vars(base).values() if isinstance(each, MemberDescriptorType)]
    return {**fields, **{each.__name__: each.__get__(value) for each in slots if _is_set(each, value)}} if slots else fields


def _is_set(slot: MemberDescriptorType, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def content_of(cell: Any) -> Any:
    """Return the content of a closure's variable; None while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def builtin_name(value: Any) -> str:
    """Return the name of a function of C, and of the class that has it."""
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    holder = "" if owner is None or isinstance(owner, ModuleType) else type_name(owner)
    return f"builtin {getattr(value, '__module__', None) or ''} {holder} {getattr(value, '__name__', '')}"
