"""DynamicVRAM on cards that are not there: what ComfyUI 0.30 calls of `comfy_aimdo`'s C library, by the names that it has there.

This module stands in the library's place; the package's own Python is used as it is. A model's weights have addresses from the start,
and pages of a card while they are used: `vbar_fault` takes pages, pins them, and tells by their serial numbers whether they are still
the same. The last pages of the models that ran longest ago go first, for other weights and for tensors. The numbers are in memory of
the host. Pages that were taken away are zeros, so whoever uses them all the same computes something else.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from . import memory, pinned, tensors

PAGE = 32 << 20
CHUNK = 16 << 20  # by which a buffer for casts grows
SUCCESS, NO_MEMORY = 0, 1

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_runtime = pinned.Runtime()


class Addresses:
    """Addresses, with memory of the host behind those that were written to."""

    def __init__(self, size: int) -> None:
        self.size = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, self.size, flags=pinned.OWN | getattr(mmap, "MAP_NORESERVE", 0x4000))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def clear(self, start: int, end: int) -> None:
        """Give memory back: they read as zeros."""
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < end:
            self.memory.madvise(mmap.MADV_DONTNEED, start, end - start)


class OnCard(Addresses):
    """Addresses of a card."""

    def __init__(self, card: int, size: int) -> None:
        super().__init__(size)
        self.card = card
        _on_cards.add(self)


class Weights(OnCard):
    """Of a model: a "VBAR".

    Attributes:
        resident: serial number of every page that is there.
        watermark: page from which on none may be there.
        limit: the watermark goes no lower.
    """

    def __init__(self, card: int, size: int) -> None:
        count = -(-min(size, memory.LEDGER.capacities[card]) // PAGE)
        super().__init__(card, count * PAGE)
        self.count = self.watermark = count
        self.limit = 0
        self.resident: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.serials: Counter[int] = Counter()

    def drop(self, page: int) -> bool:
        """Take a page away, unless it is pinned. Returns whether it was there."""
        if page in self.pinned or self.resident.pop(page, None) is None:
            return False
        self.clear(page * PAGE, (page + 1) * PAGE)
        memory.LEDGER.map(self.card, -PAGE)
        return True

    def drop_last(self) -> bool:
        """Take the last page away that may go, and lower the watermark to it. Returns whether there was one."""
        while self.watermark > self.limit:
            self.watermark -= 1
            if self.drop(self.watermark):
                return True
        return False


_on_cards: weakref.WeakSet[OnCard] = weakref.WeakSet()
_order: list[Weights] = []
"""The one that is the first to lose its pages stands first."""


def _make_room(card: int) -> bool:
    """Take one page of any model away."""
    return any(weights.drop_last() for weights in _order if weights.card == card)


def get_devctx(device: int) -> tuple[int]:
    return (device,)


def vbar_allocate(_: Any, size: int, device: int) -> Weights:
    _order.append(weights := Weights(device, size))
    return weights


def vbar_free(_: Any, weights: Weights) -> None:
    weights.pinned.clear()
    for page in list(weights.resident):
        weights.drop(page)
    _order.remove(weights)
    _on_cards.discard(weights)


def vbar_get(_: Any, weights: Weights) -> int:
    return weights.address


def vbar_prioritize(_: Any, weights: Weights, __: int) -> None:
    _order.remove(weights)
    _order.append(weights)
    weights.watermark = weights.count


def vbar_fault(_: Any, weights: Weights, offset: int, size: int, signature: Any) -> int:
    pages = range(offset // PAGE, -(-(offset + size) // PAGE))
    if pages.stop > weights.watermark:
        return NO_MEMORY
    for place, page in enumerate(pages):
        if page not in weights.resident:
            while memory.LEDGER.free(weights.card) < PAGE and _make_room(weights.card):
                pass
            if page >= weights.watermark or memory.LEDGER.free(weights.card) < PAGE:
                return NO_MEMORY
            memory.LEDGER.map(weights.card, PAGE)
            weights.serials[page] += 1
            weights.resident[page] = weights.serials[page]
        signature[place] = weights.resident[page]
    weights.pinned.update(pages)
    return SUCCESS


def vbar_unpin(_: Any, weights: Weights, offset: int, size: int) -> None:
    for page in range(offset // PAGE, -(-(offset + size) // PAGE)):
        weights.pinned.discard(page)
        if page >= weights.watermark:
            weights.drop(page)


def vbar_loaded_size(_: Any, weights: Weights) -> int:
    return PAGE * len(weights.resident)


def vbar_free_memory(_: Any, weights: Weights, size: int) -> int:
    wanted = min(-(-size // PAGE), len(weights.resident))
    return PAGE * sum(weights.drop_last() for _ in range(wanted))


def vbars_analyze(devctx: tuple[int], _: bool) -> int:
    return PAGE * sum(len(weights.resident) for weights in _order if weights.card == devctx[0])


def vbars_reset_watermark_limits(devctx: tuple[int]) -> None:
    for weights in _order:
        weights.limit = 0 if weights.card == devctx[0] else weights.limit


class CastBuffer(OnCard):
    """Memory of a card for weights on their way."""

    taken = 0


def vrambuf_create(device: int, size: int) -> CastBuffer:
    return CastBuffer(device, size)


def vrambuf_grow(buffer: CastBuffer, size: int) -> bool:
    more = -(-size // CHUNK) * CHUNK - buffer.taken
    while memory.LEDGER.free(buffer.card) < more:
        if not _make_room(buffer.card):
            return False
    memory.LEDGER.map(buffer.card, more)
    buffer.taken += more
    return True


def vrambuf_get(buffer: CastBuffer) -> int:
    return buffer.address


def vrambuf_destroy(buffer: CastBuffer) -> bool:
    memory.LEDGER.map(buffer.card, -buffer.taken)
    _on_cards.discard(buffer)
    return True


class HostBuffer:
    """Memory of the host that grows, and whose end is given back first."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0
        self.addresses: Addresses | None = None


def hostbuf_allocate(prewarm: int, most: int, _: bool) -> HostBuffer:
    return HostBuffer(prewarm + most)


def hostbuf_get_raw_address(buffer: HostBuffer) -> int:
    return buffer.addresses.address if buffer.addresses else 0


def hostbuf_extend(buffer: HostBuffer, size: int, reallocate: bool, register: bool, change: Any) -> int:
    if reallocate or register:
        raise NotImplementedError("ComfyUI does neither")
    if buffer.used + size > buffer.most:
        return 0
    buffer.addresses = buffer.addresses or Addresses(buffer.most)
    change._obj.value = size
    buffer.used += size
    return buffer.addresses.address + buffer.used - size


def hostbuf_truncate(buffer: HostBuffer, size: int, unregister: bool) -> bool:
    if size >= buffer.used or buffer.addresses is None:
        return False
    if unregister and _runtime.cudaHostUnregister(buffer.addresses.address + size) != _runtime.cudaError.success:
        return False
    buffer.addresses.clear(size, buffer.used)
    buffer.used = size
    return True


def hostbuf_free(buffer: HostBuffer) -> None:
    if buffer.addresses is not None:
        pinned.unregister_inside(buffer.addresses.address, buffer.addresses.size)


def hostbuf_read_file_slice(
    buffer: HostBuffer, _: int, file: int, start: int, size: int, offset: int, __: Any, pointer: int
) -> bool:
    address = hostbuf_get_raw_address(buffer) + offset
    done = _read(file, start, size, address)
    if done and pointer:
        ctypes.memmove(pointer, address, size)
    return done


def hostbuf_file_reader_read(_: int, file: int, start: int, size: int, __: Any, pointer: int, ___: bool) -> bool:
    return _read(file, start, size, pointer)


def _read(file: int, start: int, size: int, address: int) -> bool:
    return os.preadv(file, [(ctypes.c_char * size).from_address(address)], start) == size


class File:
    """A mapped file that cannot be written to."""

    def __init__(self, path: bytes) -> None:
        self.file = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.file).st_size
        self.address = _libc.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_PRIVATE, self.file, 0)


def model_mmap_allocate(path: bytes) -> File:
    return File(path)


def model_mmap_get(file: File) -> int:
    return file.address


def model_mmap_get_file_handle(file: File) -> int:
    return file.file


def model_mmap_deallocate(file: File) -> None:
    _libc.munmap(file.address, file.size)
    os.close(file.file)


def tensor_at(pointer: int, size: int, device: Any) -> Tensor:
    """`comfy_aimdo.torch.get_tensor_from_raw_ptr`: a tensor on a card over memory that is not torch's."""
    place = next(each for each in _on_cards if each.address <= pointer < each.address + each.size)
    numbers = torch.frombuffer(place.memory, dtype=torch.uint8, count=size, offset=pointer - place.address)
    memory.LEDGER.lend(numbers, place.card)
    return tensors.OnCard(numbers, place.card)


def install() -> None:
    """Have `comfy_aimdo` load this instead of its library, in a process that wants one: ComfyUI's server, and no rank."""
    import comfy_aimdo.control as control
    import comfy_aimdo.torch

    load, this = control.init, sys.modules[__name__]

    def init(*args: Any, **kwargs: Any) -> bool:
        control.lib = this
        return load(*args, **kwargs)

    control.init = init
    control.lib = control.lib and this  # ComfyUI loads it before torch
    memory.LEDGER.make_room = _make_room
    comfy_aimdo.torch.get_tensor_from_raw_ptr = tensor_at


# There is nothing to do, or ComfyUI does not call it; each has its own types of arguments noted.
for _name in (
    "aimdo_analyze", "cleanup", "get_total_vram_usage", "hostbuf_file_reader_cleanup", "hostbuf_register", "hostbuf_unregister", "init",
    "model_mmap_bounce", "plat_cleanup", "plat_init", "set_log_level_critical", "set_log_level_debug", "set_log_level_error",
    "set_log_level_info", "set_log_level_warning", "set_nvml_pressure", "set_simple_vram_headroom", "vbar_deprioritize",
    "vbar_get_nr_pages", "vbar_get_residency", "vbar_get_watermark", "vbar_set_watermark", "vbar_set_watermark_limit",
):  # fmt: skip
    globals()[_name] = lambda *_: True
