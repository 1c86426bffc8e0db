"""DynamicVRAM on fake CUDA devices: what ComfyUI 0.30 calls of `comfy_aimdo`'s C library, by the names that it has there.

This module stands in the library's place; the package's own Python is used as it is. A model's weights have addresses from the
start, and pages of a card while they are used: `vbar_fault` takes pages, pins them, and tells by their serial numbers whether they
are still the same. The last pages of the models that ran longest ago go first, for other weights and for tensors. The numbers are
in memory of the host. Pages that were taken away are zeros, so whoever uses them all the same computes something else.
"""

import ctypes
import mmap
import os
import sys
import weakref
from collections import Counter
from typing import Any

import numpy
import torch
from torch import Tensor

from . import memory, pinned, tensors

PAGE = 32 << 20
CHUNK = 16 << 20  # by which a buffer for casts grows
SUCCESS, NO_MEMORY = 0, 1
_runtime = pinned.Runtime()


class Addresses:
    """Addresses of a card, or of the host (-1), with memory of the host behind those that were written to.

    Attributes:
        taken: bytes that are in use.
    """

    def __init__(self, size: int, card: int = -1) -> None:
        self.size, self.card, self.taken = -(-max(1, size) // mmap.PAGESIZE) * mmap.PAGESIZE, card, 0
        self.memory = mmap.mmap(-1, self.size, flags=pinned.OWN | getattr(mmap, "MAP_NORESERVE", 0x4000))
        self.address = numpy.frombuffer(self.memory, "u1").ctypes.data
        _addresses.add(self)

    def clear(self, start: int, end: int) -> None:
        """Give memory back: it reads as zeros."""
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < end:
            self.memory.madvise(mmap.MADV_DONTNEED, start, end - start)


class Weights(Addresses):
    """Of a model: a "VBAR".

    Attributes:
        resident: serial number of every page that is there.
        watermark: from this page on none may be there.
    """

    def __init__(self, card: int, size: int) -> None:
        self.watermark = self.count = -(-min(size, memory.LEDGER.capacities[card]) // PAGE)
        super().__init__(self.count * PAGE, card)
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
        while self.watermark:
            self.watermark -= 1
            if self.drop(self.watermark):
                return True
        return False


_addresses: weakref.WeakSet[Addresses] = weakref.WeakSet()
_order: list[Weights] = []
"""The one that is the first to lose its pages stands first."""


def _pages(offset: int, size: int) -> range:
    return range(offset // PAGE, -(-(offset + size) // PAGE))


def _make_room(card: int) -> bool:
    """Take one page of any model away."""
    return any(weights.drop_last() for weights in _order if weights.card == card)


def _has_room(card: int, size: int) -> bool:
    while memory.LEDGER.free(card) < size:
        if not _make_room(card):
            return False
    return True


def _nothing(*_: Any) -> bool:
    return True


def _address(*arguments: Any) -> int:
    return arguments[-1].address


# ComfyUI does without these, or there is nothing to do.
plat_init = init = plat_cleanup = cleanup = aimdo_analyze = get_total_vram_usage = set_nvml_pressure = _nothing
set_log_level_critical = set_log_level_error = set_log_level_warning = set_log_level_info = set_log_level_debug = _nothing
vbar_deprioritize = vbar_set_watermark = vbar_set_watermark_limit = vbars_reset_watermark_limits = vbar_get_watermark = _nothing
vbar_get_nr_pages = vbar_get_residency = hostbuf_register = hostbuf_unregister = hostbuf_file_reader_cleanup = _nothing
set_simple_vram_headroom = model_mmap_bounce = _nothing
vbar_get = vrambuf_get = model_mmap_get = hostbuf_get_raw_address = _address


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


def vbar_prioritize(_: Any, weights: Weights, __: int) -> None:
    _order.remove(weights)
    _order.append(weights)
    weights.watermark = weights.count


def vbar_fault(_: Any, weights: Weights, offset: int, size: int, signature: Any) -> int:
    pages = _pages(offset, size)
    for place, page in enumerate(pages):
        if page not in weights.resident:
            if pages.stop > weights.watermark or not _has_room(weights.card, PAGE) or page >= weights.watermark:
                return NO_MEMORY
            memory.LEDGER.map(weights.card, PAGE)
            weights.serials[page] += 1
            weights.resident[page] = weights.serials[page]
        signature[place] = weights.resident[page]
    weights.pinned.update(pages)
    return SUCCESS


def vbar_unpin(_: Any, weights: Weights, offset: int, size: int) -> None:
    for page in _pages(offset, size):
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


def vrambuf_create(device: int, size: int) -> Addresses:
    return Addresses(size, device)


def vrambuf_grow(buffer: Addresses, size: int) -> bool:
    more = -(-size // CHUNK) * CHUNK - buffer.taken
    if not _has_room(buffer.card, more):
        return False
    memory.LEDGER.map(buffer.card, more)
    buffer.taken += more
    return True


def vrambuf_destroy(buffer: Addresses) -> bool:
    memory.LEDGER.map(buffer.card, -buffer.taken)
    return True


def hostbuf_allocate(prewarm: int, most: int, _: bool) -> Addresses:
    return Addresses(prewarm + most)


def hostbuf_extend(buffer: Addresses, size: int, reallocate: bool, register: bool, change: Any) -> int:
    if reallocate or register:
        raise NotImplementedError("ComfyUI does neither")
    if buffer.taken + size > buffer.size:
        return 0
    change._obj.value = size
    buffer.taken += size
    return buffer.address + buffer.taken - size


def hostbuf_truncate(buffer: Addresses, size: int, unregister: bool) -> bool:
    if size >= buffer.taken or (unregister and _runtime.cudaHostUnregister(buffer.address + size)):
        return False
    buffer.clear(size, buffer.taken)
    buffer.taken = size
    return True


def hostbuf_free(buffer: Addresses) -> None:
    pinned.unregister_inside(buffer.address, buffer.size)


def hostbuf_read_file_slice(
    buffer: Addresses, _: int, file: int, start: int, size: int, offset: int, __: Any, pointer: int
) -> bool:
    done = _read(file, start, size, buffer.address + offset)
    if done and pointer:
        ctypes.memmove(pointer, buffer.address + offset, size)
    return done


def hostbuf_file_reader_read(_: int, file: int, start: int, size: int, __: Any, pointer: int, ___: bool) -> bool:
    return _read(file, start, size, pointer)


def _read(file: int, start: int, size: int, pointer: int) -> bool:
    return os.preadv(file, [(ctypes.c_char * size).from_address(pointer)], start) == size


class File:
    """A mapped file that cannot be written to."""

    def __init__(self, path: bytes) -> None:
        self.file = os.open(path, os.O_RDONLY)
        self.memory = mmap.mmap(self.file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        self.address = numpy.frombuffer(self.memory, "u1").ctypes.data


model_mmap_allocate = File


def model_mmap_get_file_handle(file: File) -> int:
    return file.file


def model_mmap_deallocate(file: File) -> None:
    os.close(file.file)


def tensor_at(pointer: int, size: int, device: Any) -> Tensor:
    """`comfy_aimdo.torch.get_tensor_from_raw_ptr`: a tensor on a card over memory that is not torch's."""
    place = next(each for each in _addresses if each.address <= pointer < each.address + each.size)
    numbers = torch.frombuffer(place.memory, dtype=torch.uint8, count=size, offset=pointer - place.address)
    memory.LEDGER.lend(numbers, place.card)
    return tensors.OnCard(numbers, place.card)


def install() -> None:
    """Have `comfy_aimdo` use this in place of its library, in a process that loads one: ComfyUI's server, and no rank."""
    import comfy_aimdo.control as control
    import comfy_aimdo.torch

    load, this = control.init, sys.modules[__name__]

    def init(*args: Any, **kwargs: Any) -> bool:
        control.lib = this
        return load(*args, **kwargs)

    control.init = init
    control.lib = control.lib and this  # ComfyUI loads it before torch
    comfy_aimdo.torch.get_tensor_from_raw_ptr = tensor_at
    memory.LEDGER.make_room = _make_room
