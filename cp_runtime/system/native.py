"""Python's own C, on every system: what Python has no other way to do. Libraries of the system are in `posix` and `windows`."""

from __future__ import annotations

import ctypes
import mmap
from types import CellType, FunctionType


def address_of(memory: mmap.mmap) -> int:
    """Return where mapped memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def set_closure(function: FunctionType, cells: tuple[CellType, ...]) -> None:
    """Give a function the very cells that other functions have."""
    ctypes.pythonapi.PyFunction_SetClosure(ctypes.py_object(function), ctypes.py_object(cells))
