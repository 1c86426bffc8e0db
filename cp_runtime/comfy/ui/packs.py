"""Whose a file is: ComfyUI's, a node pack's, or another's."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Iterator, Set
from types import FrameType, ModuleType

import comfy

from ..shared.assigned import names_in
from ..shared.origin import in_library
from .runtime import node_folders

COMFY = os.path.dirname(os.path.abspath(next(iter(comfy.__path__))))
PACKAGE = __name__.partition(".comfy.")[0]


@functools.cache
def pack_path(file: str) -> str:
    """Return the file or folder of the node pack that a file belongs to, in ComfyUI's folder of packs; "" for another file."""
    for folder in node_folders():
        if file.startswith(os.path.join(folder, "")):
            return os.path.join(folder, os.path.relpath(file, folder).split(os.sep)[0])
    return ""


def pack_of(file: str) -> str:
    """Return the name of the node pack that a file belongs to; "" for another file."""
    return os.path.basename(pack_path(file))


@functools.cache
def is_comfy(file: str) -> bool:
    """Return whether a file is ComfyUI's, below its package `comfy`."""
    return file.startswith(os.path.join(COMFY, "comfy", "")) and not pack_path(file)


def packs_of(files: Iterable[str]) -> set[str]:
    """Return the paths of the node packs that files belong to, without this one."""
    return set(filter(None, map(pack_path, set(files)))) - {pack_path(os.path.abspath(__file__))}


def in_order(packs: Iterable[str]) -> tuple[str, ...]:
    """Return packs in the order in which this process has imported them."""
    left, found = set(packs), []
    for pack, _ in _modules() if left else ():
        if pack in left:
            left.remove(pack)
            found.append(pack)
    return (*found, *sorted(left))


def packs_naming(names: Set[str]) -> set[str]:
    """Return the packs with code that mentions one of these names."""
    return packs_of(str(module.__file__) for _, module in _modules() if names & _names_in_file(module.__name__))


def _modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield the pack and itself of every module of a pack, in the order of the imports."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and (pack := pack_path(os.path.abspath(file))):
            yield pack, module


@functools.cache
def _names_in_file(module: str) -> frozenset[str]:
    with contextlib.suppress(Exception):  # a file that is gone, or no file of Python's
        return names_in(sys.modules[module].__loader__.get_code(module))  # type: ignore[union-attr]
    return frozenset()


def running_code() -> str:
    """Name the innermost code of a node pack that runs in this thread; without any, the innermost function of other code than
    Python's, a package's or this one's."""
    frame: FrameType | None = sys._getframe(1)
    own, fallback = pack_of(os.path.abspath(__file__)), ""
    while frame is not None:
        file, name, module = frame.f_code.co_filename, frame.f_code.co_name, str(frame.f_globals.get("__name__", ""))
        if pack_of(file) not in ("", own):
            return f"the node pack {pack_of(file)} ({name})"
        if not (fallback or in_library(module) or module.startswith(PACKAGE)):
            fallback = f"{os.path.basename(file)} ({name})"
        frame = frame.f_back
    return fallback or "a node"
