"""Pinned memory of the host, as torch and CUDA hand it out.

`Tensor.pin_memory` and `pin_memory=True` take blocks of torch's host cache, each of a power of two bytes. When its tensor is freed
a block is kept for the next one of that size, until the cache is emptied. `cudaHostRegister` pins exactly the range given.
The memory is really taken, and registering fetches the pages for writing: those that a process has mapped privately become its own.
"""

import bisect
import ctypes
import mmap
import threading
import weakref
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor

POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

_libc = ctypes.CDLL(None)
_starts: list[int] = []
_sizes: dict[int, int] = {}
"""Of every pinned range, by its first address."""
_registered: set[int] = set()
_cached: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
"""Blocks of the host cache that no tensor has, by their bytes."""
_counts: Counter[str] = Counter()
_lock = threading.RLock()
_errors: list[int] = []


class Runtime:
    """`torch.cuda.cudart()`."""

    class cudaError:
        success, invalid, already_registered, not_registered = 0, 1, 712, 713

    def cudaHostRegister(self, address: int, size: int, flags: int = 0) -> int:
        """Pin a range; returns an error where it cannot be written or is pinned in part."""
        last = bisect.bisect_left(_starts, address + size) - 1
        if last >= 0 and _starts[last] + _sizes[_starts[last]] > address:
            return _refuse(self.cudaError.already_registered)
        first = address // mmap.PAGESIZE * mmap.PAGESIZE
        if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + size - first), POPULATE_WRITE):
            return _refuse(self.cudaError.invalid)
        _note(address, size)
        _registered.add(address)
        return self.cudaError.success

    def cudaHostUnregister(self, address: int) -> int:
        """Let go of a range that was registered at this address."""
        if address not in _registered:
            return _refuse(self.cudaError.not_registered)
        _registered.remove(address)
        _forget(address)
        return self.cudaError.success


def _refuse(code: int) -> int:
    _errors[:] = [code]
    return code


def last_error() -> int:
    """What the next kernel fails with, once, because nobody has asked for it: `cudaGetLastError`."""
    return _errors.pop() if _errors else 0


def pinned(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in a block of the host cache, with its strides."""
    tensor = tensor.detach()
    if not tensor.numel():
        return tensor
    elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    block = torch.frombuffer(_block(elements * tensor.itemsize), dtype=torch.uint8, count=elements * tensor.itemsize)
    return block.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def is_pinned(tensor: Tensor) -> bool:
    """Whether the memory of a tensor of the CPU lies in a pinned range."""
    address = tensor.untyped_storage().data_ptr()
    with _lock:
        place = bisect.bisect_right(_starts, address) - 1
        return place >= 0 and address < _starts[place] + _sizes[_starts[place]]


def empty_cache() -> None:
    """Give back what no tensor has: `torch._C._host_emptyCache`."""
    for size, blocks in _cached.items():
        for block in blocks:
            _forget(_address(block))
            _counts["allocated_bytes"] -= size
    _cached.clear()


def stats() -> dict[str, int]:
    """`torch.cuda.host_memory_stats`: bytes of all blocks, and of those that tensors have. Beside torch's: what is registered."""
    registered = sum(_sizes[address] for address in _registered)
    return {f"{name}.current": _counts[name] for name in ("allocated_bytes", "active_bytes")} | {"registered_bytes": registered}


def unregister_inside(start: int, size: int) -> None:
    """Let go of whatever was registered in a range."""
    for address in [address for address in _registered if start <= address < start + size]:
        Runtime().cudaHostUnregister(address)


def _block(nbytes: int) -> Any:
    """Memory of a block, which goes back to the cache with the last tensor that has it."""
    size = 1 << (nbytes - 1).bit_length()
    try:
        block = _cached[size].pop()
    except IndexError:
        block = mmap.mmap(-1, size, flags=OWN | getattr(mmap, "MAP_POPULATE", 0x8000))
        _note(_address(block), size)
        _counts["allocated_bytes"] += size
    memory = (ctypes.c_char * size).from_buffer(block)
    _counts["active_bytes"] += size
    weakref.finalize(memory, _free, size, block).atexit = False
    return memory


def _free(size: int, block: mmap.mmap) -> None:
    _counts["active_bytes"] -= size
    _cached[size].append(block)


def _address(block: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def _note(address: int, size: int) -> None:
    with _lock:
        bisect.insort(_starts, address)
        _sizes[address] = size


def _forget(address: int) -> None:
    with _lock:
        _starts.remove(address)
        del _sizes[address]
