"""The code that a model computes with, as it is in this process, against the files that it comes from.

Ranks import ComfyUI afresh. What a node pack has put into its classes and modules, at import or by a node, exists in this process
only: methods of the model's classes and of their bases, functions and constants of ComfyUI's modules that these use, by name and by
what those use in turn. All of it is compared with the files once; then only with what was found there.
"""

from __future__ import annotations

import ast
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

from .ui_sources import Source, file_of, functions_in, in_library, is_comfy, names_in, pack_of, source_of

LIBRARIES = ("torch", "comfy_kitchen", "einops")  # packages whose functions compute, besides ComfyUI's
# They decide where weights lie and what is called around the forward, in this process; ranks have other devices and duties.
_ELSEWHERE = """
    cli_args memory_management model_management model_patcher model_prefetch options patcher_extension pinned_memory
"""
ELSEWHERE = frozenset(f"comfy.{name}" for name in _ELSEWHERE.split())
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})
SEVERAL = frozenset({tuple, frozenset})  # modules fill lists and dicts after they have assigned them
UNKNOWN = object()


class Change(NamedTuple):
    """Something in this process that is not what its file says.

    Args:
        what: its full name.
        file: that the code which is there now comes from; "" = it is no code, or another piece of ComfyUI's.
    """

    what: str
    file: str


class Comparison:
    """The comparison of some classes, and of what they use, with their files.

    Attributes:
        changes: what differs.
    """

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
        """Return whether all is as it was compared."""
        return (
            all(owner.get(name, UNKNOWN) is value for owner, name, value in self._held)
            and all(function.__code__ is code for function, code in self._code)
            and all(len(owner) == size for owner, size in self._sizes)
        )

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

    # --- what they use ----------------------------------------------------------------------------------------------------

    def _use(self, functions: list[FunctionType], file: str) -> None:
        """Go on with what functions of ComfyUI, or of the file of one of the model's classes, use."""
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
    """Return whether a value is what a module's file binds to a name."""
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
    expected = _assigned(source, module, name)
    if expected is UNKNOWN:
        return name not in source.codes and name not in source.imported and not _has_foreign(functions, source.file)
    return _same(expected, value)


def _is_defined(source: Source, path: str, value: Any) -> bool:
    """Return whether a value is a function that the file defines under a name, with the decorators that it has there."""
    known = source.codes.get(path, ())
    inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if isinstance(inner, FunctionType) and inner.__code__ in known:
        return True
    if isinstance(value, type):
        return path in source.codes
    functions = functions_in(value)
    return any(f.__code__ in known for f in functions) and path in source.decorated and not _has_foreign(functions, source.file)


def _assigned(source: Source, module: str, name: str) -> Any:
    """Return what the file assigns to a name, by doing so again with what else the module holds now; UNKNOWN where it does not, or
    where that cannot be repeated."""
    statements = source.assigning(name) if is_comfy(source.file) else []
    if not statements:
        return UNKNOWN
    namespace = {k: v for k, v in vars(sys.modules[module]).items() if k != name}
    tree = ast.fix_missing_locations(ast.Module(statements, []))
    try:
        exec(compile(tree, source.file, "exec"), namespace)  # noqa: S102 - ComfyUI's own statements, which ran when it was imported
    except Exception:  # noqa: BLE001 - whatever they raise, they cannot be repeated: they need what is gone, such as the value before
        return UNKNOWN
    return namespace.get(name, UNKNOWN)


def _literal(source: Source, name: str, owner: str) -> Any:
    """Return the constant that the body of a class assigns to a name; UNKNOWN where it is none, or not the only one."""
    statements = source.assigning(name, owner)
    if len(statements) != 1 or not isinstance(statements[0], ast.Assign | ast.AnnAssign) or statements[0].value is None:
        return UNKNOWN
    try:
        return ast.literal_eval(statements[0].value)
    except ValueError:
        return UNKNOWN


def _same(expected: Any, value: Any) -> bool:
    if expected is value:
        return True
    if _is_plain(value):
        return type(expected) is type(value) and repr(expected) == repr(value)
    codes, others = ([function.__code__ for function in functions_in(each)] for each in (expected, value))
    return bool(codes) and codes == others and type(expected) is type(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a constant, or holds nothing else."""
    return type(value) in PLAIN or (type(value) in SEVERAL and all(map(_is_plain, value)))


def _has_foreign(functions: list[FunctionType], file: str) -> bool:
    """Return whether a function is neither of ComfyUI, nor of a library, nor of this file."""
    files = {function.__code__.co_filename for function in functions} - {file}
    return not all(is_comfy(own) or in_library(own) for own in files)


def _change(what: str, value: Any) -> Change:
    """Return a change, with the file that is most likely a pack's."""
    codes = [function.__code__ for function in functions_in(value)]
    files = [code.co_filename for code in codes] + ([file_of(value.__module__)] if isinstance(value, type) else [])
    file = next(filter(pack_of, files), next(iter(files), ""))
    return Change(what, "" if is_comfy(file) and not _is_older(file, codes) else file)


def _is_older(file: str, codes: list[CodeType]) -> bool:
    """Return whether some of these pieces of code came from a file, and are not in it any more."""
    known = {code for found in Source("changed", file).codes.values() for code in found}
    return any(code.co_filename == file and code not in known for code in codes)


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_compared: WeakKeyDictionary[nn.Module, Comparison] = WeakKeyDictionary()
_known: dict[frozenset[type], Comparison] = {}


def changes_of(model: nn.Module, again: bool = True) -> list[Change]:
    """Return what in this process differs from the files of the classes that a model consists of, and of what they use.

    Args:
        again: look at the model's modules; else at the classes that it had.
    """
    comparison = None if again else _compared.get(model)
    if comparison is None:
        classes = frozenset(type(module) for module in model.modules())
        comparison = _known.get(classes)
        if comparison is None or comparison.changes or not comparison.holds():
            comparison = _known[classes] = Comparison(set(classes))
        _compared[model] = comparison
    elif comparison.changes or not comparison.holds():
        return changes_of(model)
    return comparison.changes
