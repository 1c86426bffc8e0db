"""Pages of files that this process has mapped: finds them, and drops them from its memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Mapping

from torch import Tensor

from ...nested import stored
from ...system import system
from .cast import memory_of
from .packing import round_up

Ranges = list[tuple[int, int]]  # (first address, address after the last)


def mapped(path: str, *, unwritten: bool = False) -> Ranges:
    """Return the ranges of addresses at which this process has mapped a file; none where the system does not tell. `unwritten`:
    only those without a page that this process has written to, and has to itself since."""
    return system.map_ranges(path, unwritten)


def written(path: str, weights: Mapping[str, Tensor]) -> str | None:
    """Return the first weight in the pages of a file whose numbers this process has changed since, or None. It reads the file where
    it has written to pages only; finding these takes a millisecond per GB."""
    ranges = system.written_ranges(path)
    if not ranges:
        return None
    with open(path, "rb") as file:
        for name, weight in weights.items():
            for part in map(memory_of, stored(weight)):
                begin, end = part.data_ptr(), part.data_ptr() + part.nbytes
                for start, stop, place in ranges if part.device.type == "cpu" else ():
                    low, high = max(begin, start), min(end, stop)
                    if low < high and ctypes.string_at(low, high - low) != os.pread(file.fileno(), high - low, place + low - start):
                        return name
    return None


def inside(tensor: Tensor, ranges: Ranges) -> bool:
    """Return whether all of a tensor lies in one of these ranges."""
    if tensor.device.type != "cpu":
        return False
    begin = tensor.data_ptr()
    return any(start <= begin and begin + tensor.nbytes <= stop for start, stop in ranges)


def give_back(weights: Iterable[Tensor], pages: Ranges) -> None:
    """Release this process's pages of a file. They stay in the computer's page cache, and can be read again.

    Args:
        weights: in use, so their addresses cannot hold other memory by now.
        pages: ranges of addresses at which the file is mapped; other memory would lose its contents.
    """
    for part in (memory_of(part) for weight in weights for part in stored(weight)):
        if inside(part, pages):
            begin = round_up(part.data_ptr(), mmap.PAGESIZE)
            end = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                system.release_pages(begin, end)
