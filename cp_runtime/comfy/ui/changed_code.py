"""The code that a model computes with, in this process, against its files.

Ranks import ComfyUI afresh. Changes by a node pack to its classes and modules, at import or by a node, exist in this process only:
methods of the model's classes and of their bases, functions and constants of ComfyUI's modules that these use, by name and
transitively. All of it is compared with the files once; then only with the values found there.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .sources import Source, file_of, functions_in, in_library, is_comfy, names_in, pack_of, source_of

LIBRARIES = ("torch", "comfy_kitchen", "einops")  # packages whose functions compute, besides ComfyUI's
# They decide where weights lie and which code surrounds the forward, in this process; ranks have other devices and duties.
_ELSEWHERE = """
    cli_args memory_management model_management model_patcher model_prefetch options patcher_extension pinned_memory
"""
ELSEWHERE = frozenset(f"comfy.{name}" for name in _ELSEWHERE.split())
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})
SEVERAL = frozenset({tuple, frozenset})  # modules fill lists and dicts after their assignment
UNKNOWN = object()


class Change(NamedTuple):
    """An object in this process that differs from its file. `what`: its full name; `file`: of the current code, "" = it is no code,
    or another piece of ComfyUI's."""

    what: str
    file: str


class Comparison:
    """The comparison of some classes, and of everything they use, with their files."""

    def __init__(self, classes: set[type]) -> None:
        self.changes: list[Change] = []
        self._held: list[tuple[Mapping[str, Any], str, Any]] = []
        self._code: list[tuple[FunctionType, CodeType]] = []
        self._sizes: list[tuple[Mapping[str, Any], int]] = []  # of classes, to which a method may be added that hides a base's
        self._followed: set[CodeType] = set()
        self._checked: set[type] = set()
        self._bound: set[tuple[str, str]] = set()
        self._left: list[Callable[[], None]] = [functools.partial(self._class, cls) for cls in sorted(classes, key=_name_of)]
        while self._left:
            self._left.pop()()

    def holds(self) -> bool:
        """Return whether nothing has changed since the comparison."""
        for owner, name, value in self._held:  # before every call: a generator would take four times as long
            if owner.get(name, UNKNOWN) is not value:
                return False
        for function, code in self._code:
            if function.__code__ is not code:
                return False
        for owner, size in self._sizes:  # noqa: SIM110
            if len(owner) != size:
                return False
        return True

    # --- classes ----------------------------------------------------------------------------------------------------------

    def _class(self, cls: type) -> None:
        for base in cls.__mro__:
            source = source_of(base.__module__)
            if source is None or base in self._checked:
                continue
            self._checked.add(base)
            self._sizes.append((vars(base), len(vars(base))))
            for name, value in list(vars(base).items()):
                self._held.append((vars(base), name, value))
                if not self._attribute(base, name, value, source):
                    self.changes.append(_change(f"{base.__module__}.{base.__qualname__}.{name}", value))

    def _attribute(self, cls: type, name: str, value: Any, source: Source) -> bool:
        path, functions = f"{cls.__qualname__}.{name}", functions_in(value)
        if in_library(source.file):
            return _is_of_library(cls.__module__, functions)
        if path in source.codes or functions:
            known = source.codes.get(path)
            self._use(functions, source.file)
            hides = any(name in vars(base) for base in cls.__mro__[1:])
            return _is_defined(source, path, value) if known else not hides or not _has_foreign(functions, source.file)
        if (
            not is_comfy(source.file)
            or "<locals>" in path
            or (name.startswith("__") and name.endswith("__"))
            or not _is_plain(value)
        ):
            return True
        expected = _literal(source, name, cls.__qualname__)
        return expected is UNKNOWN or _same(expected, value)

    # --- names that they use -----------------------------------------------------------------------------------------------

    def _use(self, functions: list[FunctionType], file: str) -> None:
        """Continue with the names used by functions of ComfyUI, or of the file of one of the model's classes."""
        for function in functions:
            self._code.append((function, function.__code__))
            own = function.__code__.co_filename
            if function.__code__ not in self._followed and (own == file or is_comfy(own)) and not in_library(own):
                self._followed.add(function.__code__)
                self._names(function.__globals__, names_in(function.__code__))

    def _names(self, namespace: dict[str, Any], names: frozenset[str]) -> None:
        module = str(namespace.get("__name__"))
        for name in names & namespace.keys():
            value = namespace[name]
            if (module, name) in self._bound and not isinstance(value, ModuleType):
                continue
            self._bound.add((module, name))
            if isinstance(value, ModuleType):
                if value.__name__ not in ELSEWHERE and value.__name__.partition(".")[0] in ("comfy", *LIBRARIES):
                    self._left.append(functools.partial(self._of_module, value, names))
            elif module not in ELSEWHERE:
                self._held.append((namespace, name, value))
                self._left.append(functools.partial(self._binding, module, name, value))

    def _of_module(self, module: ModuleType, names: frozenset[str]) -> None:
        key = module.__name__, repr(sorted(names))
        if key not in self._bound:
            self._bound.add(key)
            self._names(vars(module), names)

    def _binding(self, module: str, name: str, value: Any) -> None:
        if not _is_bound(module, name, value):
            self.changes.append(_change(f"{module}.{name}", value))
        elif isinstance(value, type):
            if value.__module__.partition(".")[0] == "comfy":
                self._class(value)
        else:
            source = source_of(module)
            self._use(functions_in(value), source.file if source else "")


def _is_of_library(module: str, functions: list[FunctionType]) -> bool:
    """Return whether functions found in a library are its own: torch changes itself, and other packages put theirs there."""
    home = os.path.join(os.path.dirname(file_of(module.partition(".")[0])), "")
    files = {function.__code__.co_filename for function in functions}
    return all(map(in_library, files)) and (not files or any(file.startswith((home, "<")) for file in files))


def _is_bound(module: str, name: str, value: Any) -> bool:
    """Return whether a value is the one that a module's file binds to a name."""
    source = source_of(module)
    if module in ELSEWHERE or source is None:
        return True
    functions = functions_in(value)
    if in_library(source.file):
        return _is_of_library(module, functions)
    if isinstance(value, type):
        file = file_of(value.__module__)
        if name in source.codes and name not in source.imported:
            return (file, value.__qualname__) == (source.file, name)
        return file == source.file or in_library(file) or is_comfy(file) or not file
    if not functions and not _is_plain(value):
        return True
    if _is_defined(source, name, value):
        return True
    package = getattr(sys.modules[module], "__package__", None)
    origins = [(importlib.util.resolve_name(origin, package), there) for origin, there in source.imported.get(name, ())]
    if any(origin in sys.modules and _is_bound(origin, there, value) for origin, there in origins):
        return True
    expected = [_evaluated(each, module) for each in source.assigned(name)] if is_comfy(source.file) else []
    if any(_same(each, value) for each in expected):
        return vars(sys.modules[module]).get(name) is value  # ComfyUI chose one of them at import
    known = name in source.codes or name in source.imported or (expected and UNKNOWN not in expected)
    return not known and not _has_foreign(functions, source.file)


def _is_defined(source: Source, path: str, value: Any) -> bool:
    """Return whether a value is the function that the file defines under a name, with the same decorators."""
    known = source.codes.get(path, ())
    inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if isinstance(inner, FunctionType) and inner.__code__ in known:
        return True
    if isinstance(value, type):
        return path in source.codes
    functions = functions_in(value)
    return any(f.__code__ in known for f in functions) and path in source.decorated and not _has_foreign(functions, source.file)


def _evaluated(expression: ast.expr | None, module: str = "") -> Any:
    """Return the value of a constant, of a name in a module, or of a call without arguments; UNKNOWN for anything else."""
    with contextlib.suppress(ValueError, TypeError, SyntaxError):
        return ast.literal_eval(expression or "")
    if isinstance(expression, ast.Attribute):
        return getattr(_evaluated(expression.value, module), expression.attr, UNKNOWN)
    if isinstance(expression, ast.Call) and not (expression.args or expression.keywords):
        called = _evaluated(expression.func, module)
        return called() if isinstance(called, FunctionType) and is_comfy(called.__code__.co_filename) else UNKNOWN
    return vars(sys.modules[module]).get(expression.id, UNKNOWN) if isinstance(expression, ast.Name) and module else UNKNOWN


def _literal(source: Source, name: str, owner: str) -> Any:
    """Return the constant that the body of a class assigns to a name; UNKNOWN if it is none, or not the only one."""
    found = source.assigned(name, owner)
    return _evaluated(found[0]) if len(found) == 1 else UNKNOWN


def _same(expected: Any, value: Any) -> bool:
    if expected is value:
        return True
    if _is_plain(value):
        return type(expected) is type(value) and repr(expected) == repr(value)
    codes, others = ([function.__code__ for function in functions_in(each)] for each in (expected, value))
    return bool(codes) and codes == others and type(expected) is type(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a constant, or holds only constants."""
    return type(value) in PLAIN or (type(value) in SEVERAL and all(map(_is_plain, value)))


def _has_foreign(functions: list[FunctionType], file: str) -> bool:
    """Return whether a function is neither of ComfyUI, nor of a library, nor of this file."""
    files = {function.__code__.co_filename for function in functions} - {file}
    return not all(is_comfy(own) or in_library(own) for own in files)


def _change(what: str, value: Any) -> Change:
    """Return a change, with the file most likely to be a pack's."""
    codes = [function.__code__ for function in functions_in(value)]
    files = [each.co_filename for each in codes] + ([file_of(value.__module__)] if isinstance(value, type) else [])
    file = next(filter(pack_of, files), next(iter(files), ""))
    return Change(what, "" if is_comfy(file) and not _is_older(file, codes) else file)


def _is_older(file: str, codes: list[CodeType]) -> bool:
    """Return whether some of these pieces of code came from a file, and are not in it any more."""
    known = {code for found in Source("changed", file).codes.values() for code in found}
    return any(each.co_filename == file and each not in known for each in codes)


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_compared: WeakKeyDictionary[nn.Module, Comparison] = WeakKeyDictionary()
_known: dict[frozenset[type], Comparison] = {}


def changes_of(model: nn.Module, again: bool = True) -> list[Change]:
    """Return the differences between this process and the files of a model's classes, and of all they use. `again`: check the
    model's current modules, not only the classes found before."""
    comparison = None if again else _compared.get(model)
    if comparison is None:
        comparison = _compared[model] = _comparison_of(frozenset(type(module) for module in model.modules()))
    elif comparison.changes or not comparison.holds():
        return changes_of(model)
    return comparison.changes


def changes_in(classes: frozenset[type]) -> list[Change]:
    """Return the differences between this process and the files of some classes, and of all they use."""
    return _comparison_of(classes).changes


def _comparison_of(classes: frozenset[type]) -> Comparison:
    comparison = _known.get(classes)
    if comparison is None or comparison.changes or not comparison.holds():
        comparison = _known[classes] = Comparison(set(classes))
    return comparison
