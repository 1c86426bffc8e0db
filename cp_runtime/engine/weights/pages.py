"""Pages of files that this process has mapped: finds them, and drops them from its memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

from torch import Tensor

from ...nested import stored
from ...system import system
from .packing import round_up

Ranges = list[tuple[int, int]]  # (first address, address after the last)


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
    for part in (part for weight in weights for part in stored(weight)):
        if inside(part, pages):
            begin = round_up(part.data_ptr(), mmap.PAGESIZE)
            end = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                system.release_pages(begin, end)
