"""Files with Python source: their definitions, imports and assignments; and whose files they are."""

from __future__ import annotations

import ast
import functools
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.metadata import packages_distributions
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import comfy
from torch import nn

from .runtime import node_folders

COMFY = os.path.dirname(os.path.abspath(next(iter(comfy.__path__))))
WRAPPED = (
    "__func__",
    "__wrapped__",
    "func",
    "fget",
    "_torchdynamo_orig_callable",
    "_orig_mod",
)  # attributes with a wrapped function
PACKAGE = __name__.partition(".comfy.")[0]
LIBRARY_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")


class Source:
    """A file with Python source. `codes`: of all its definitions, by qualified name; all alternatives under one name."""

    def __init__(self, name: str, file: str) -> None:
        self.file = file
        self.codes: dict[str, list[CodeType]] = {}
        self._add(SourceFileLoader(name, file).get_code(name), "")

    def _add(self, body: CodeType | None, prefix: str) -> None:
        for constant in body.co_consts if body else ():
            if isinstance(constant, CodeType):
                path = prefix + constant.co_name
                self.codes.setdefault(path, []).append(constant)
                is_function = constant.co_flags & 1  # CO_OPTIMIZED; bodies of classes are not
                self._add(constant, path + (".<locals>." if is_function else "."))

    @functools.cached_property
    def tree(self) -> ast.Module:
        with open(self.file, "rb") as file:
            return ast.parse(file.read())

    @functools.cached_property
    def decorated(self) -> set[str]:
        """Names of decorated functions, without those inside of functions."""
        return {path for path, node in _definitions(self.tree, "") if getattr(node, "decorator_list", ())}

    @functools.cached_property
    def imported(self) -> dict[str, list[tuple[str, str]]]:
        """Origin of the names imported at the top of the file: (module, as it stands there, and name in it)."""
        found: dict[str, list[tuple[str, str]]] = {}
        for node in _statements(self.tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    module = "." * node.level + (node.module or "")
                    found.setdefault(alias.asname or alias.name, []).append((module, alias.name))
        return found

    def assigned(self, name: str, owner: str = "") -> list[ast.expr | None]:
        """Return the values assigned to a name at the top of the file or of a class; None for those based on the old value."""
        tree: Any = self.tree
        for part in filter(None, owner.split(".")):
            tree = next((n for n in _statements(tree) if isinstance(n, ast.ClassDef) and n.name == part), ast.Module([], []))
        found: list[ast.expr | None] = []
        for node in _statements(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                found.append(node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None)
        return found


def _definitions(tree: Any, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in _statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, f"{prefix}{node.name}.")


def _statements(tree: Any) -> Iterator[ast.stmt]:
    """Yield the statements of a body, and those below them that belong to the same scope."""
    for field in ("body", "orelse", "handlers", "finalbody"):
        for node in getattr(tree, field, ()):
            yield node
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _statements(node)


@functools.cache
def source_of(module: str) -> Source | None:
    """Return the source of an imported module; None for one without."""
    file = os.path.abspath(getattr(sys.modules.get(module), "__file__", None) or "")
    return Source(module, file) if file.endswith(".py") and os.path.isfile(file) else None


def functions_in(value: Any) -> list[FunctionType]:
    """Return a function and all functions that its decorators have wrapped around each other."""
    found, seen, left = list[FunctionType](), set[int](), [value]
    while left:
        each = left.pop(0)
        if id(each) in seen or each is None or isinstance(each, type | ModuleType | nn.Module):
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):
            found.append(each)
            left += [cell.cell_contents for cell in each.__closure__ or () if _is_callable(cell)]
        left += [inner for name in WRAPPED if (inner := getattr(each, name, None)) is not None and callable(inner)]
    return found


def _is_callable(cell: Any) -> bool:
    try:
        return callable(cell.cell_contents)
    except ValueError:  # empty
        return False


@functools.cache
def names_in(body: CodeType) -> frozenset[str]:
    inner = (constant for constant in body.co_consts if isinstance(constant, CodeType))
    return frozenset(body.co_names).union(*map(names_in, inner))


@functools.cache
def file_of(module: str) -> str:
    """Return the file of an imported module; "" for one without."""
    return os.path.abspath(file) if (file := getattr(sys.modules.get(module), "__file__", None)) else ""


@functools.cache
def is_comfy(file: str) -> bool:
    """Return whether a file is ComfyUI's, below its package `comfy`."""
    return file.startswith(os.path.join(COMFY, "")) and not pack_of(file) and not in_library(file)


@functools.cache
def in_library(file: str) -> bool:
    """Return whether a file is Python's or a package's. Code without a file is generated by one: dataclasses, torch.fx."""
    folders = {*map(sysconfig.get_path, LIBRARY_PATHS), *site.getsitepackages(), site.getusersitepackages()}
    usual = file.startswith(("<", *(os.path.join(folder, "") for folder in folders)))
    return usual or (file.startswith(_elsewhere()) and not pack_of(file))


@functools.cache
def _elsewhere() -> tuple[str, ...]:
    """Return the folders and files of installed packages, wherever they are: PYTHONPATH, `pip install --target`, editable."""
    found = [sys.modules[name] for name in packages_distributions() if name in sys.modules and name != comfy.__name__]
    packages = [os.path.join(os.path.abspath(folder), "") for each in found for folder in getattr(each, "__path__", ())]
    return (*packages, *filter(None, (file_of(each.__name__) for each in found if not hasattr(each, "__path__"))))


def pack_of(file: str) -> str:
    """Return the name of the node pack that a file belongs to; "" for another file."""
    for folder in node_folders():
        if file.startswith(os.path.join(folder, "")):
            return os.path.relpath(file, folder).split(os.sep)[0]
    return ""


def running_code() -> str:
    """Name the innermost code of a node pack that runs in this thread; without any, the innermost function of other code than
    Python's, a package's or this one's."""
    frame: FrameType | None = sys._getframe(1)
    own, fallback = pack_of(os.path.abspath(__file__)), ""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if pack_of(file) not in ("", own):
            return f"the node pack {pack_of(file)} ({name})"
        if not (fallback or in_library(file) or frame.f_globals.get("__name__", "").startswith(PACKAGE)):
            fallback = f"{os.path.basename(file)} ({name})"
        frame = frame.f_back
    return fallback or "a node"
