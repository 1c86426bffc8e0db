"""Pages of files that this process has mapped: finds them, and drops them from its memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

from torch import Tensor, frombuffer, uint8

from ...nested import stored
from .cast import memory_of
from .packing import round_up

Ranges = list[tuple[int, int]]  # (first address, address after the last)


def mapped(path: str, *, unwritten: bool = False) -> Ranges:
    """Return the ranges of addresses at which this process has mapped a file. `unwritten`: only those without a page that this
    process has written to, and has to itself since.

    Device and inode come from a page mapped for this purpose: on some file systems `stat` reports others than the kernel.
    """
    with open(path, "rb") as file:
        page = frombuffer(mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_COPY), dtype=uint8)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as entries:
        found = [entry.split(maxsplit=5) for entry in entries]
    spans = [(int(start, 16), int(stop, 16)) for start, stop in (words[0].split("-") for words in found)]
    ours = next(words[3:5] for span, words in zip(spans, found, strict=True) if inside(page, [span]))
    files = [span for span, words in zip(spans, found, strict=True) if words[3:5] == ours]
    return [span for span in files if not _was_written(span)] if unwritten else files


# Of the last of the eight bytes that pagemap has for a page: https://docs.kernel.org/admin-guide/mm/pagemap.html
_PRESENT, _SWAPPED, _SHARED = 1 << 7, 1 << 6, 1 << 5


def _was_written(span: tuple[int, int]) -> bool:
    """Return whether a page of these addresses, at which a file is mapped, is no longer the file's."""
    start, stop = (address // mmap.PAGESIZE * 8 for address in span)
    with open("/proc/self/pagemap", "rb") as entries:
        entries.seek(start)
        kinds = set(entries.read(stop - start)[7::8])
    return any(kind & _SWAPPED or kind & (_PRESENT | _SHARED) == _PRESENT for kind in kinds)


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
    libc = ctypes.CDLL(None)
    for part in (memory_of(part) for weight in weights for part in stored(weight)):
        if inside(part, pages):
            begin = round_up(part.data_ptr(), mmap.PAGESIZE)
            end = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Return this process's free memory to the system. glibc keeps memory on its heap below a used piece."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
