"""Memory of one rank that all ranks of its computer map: what it sends, and what it tells about that.

It is a memfd, which has no name to leak and does not count against /dev/shm. Other ranks open it through `/proc`, and know it by
random numbers in it: a number of a process means something else in another container or computer.

| at | what |
|---|---|
| 0 | random numbers |
| `LINE` + `LINK` * receiver | semaphore "ready", raised for every piece of a message to it |
| + `SEMAPHORE` | semaphore "read", raised by the receiver for every message that it has read |
| + 2 `SEMAPHORE` | places of the last `KEPT` messages to it |
| behind them | messages |
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

from .signals import SEMAPHORE

LINE, LINK = 64, 2048
KEPT = (LINK - 2 * SEMAPHORE) // 8


class Segment:
    """The memory of one rank.

    Args:
        ranks: number of receivers, the rank itself included.
        owner: process and descriptor of it; None = make it.

    Raises:
        OSError, ValueError: there is no such memory, or no room for it.

    Attributes:
        begin: where messages begin.
    """

    def __init__(self, ranks: int, owner: tuple[int, int] | None = None) -> None:
        self.begin = -(-(LINE + LINK * ranks) // mmap.PAGESIZE) * mmap.PAGESIZE
        if owner is None:
            self.fd = os.memfd_create("context-parallel-exchange", os.MFD_CLOEXEC)
            os.posix_fallocate(self.fd, 0, self.begin)
            os.pwrite(self.fd, os.urandom(16), 0)
        else:
            self.fd = os.open("/proc/{}/fd/{}".format(*owner), os.O_RDWR | os.O_CLOEXEC)
        self._head = self._all = mmap.mmap(self.fd, self.begin)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._head))
        self._words = memoryview(self._head).cast("q")
        self.size = self.begin

    @property
    def token(self) -> tuple[int, int]:
        """Random numbers of its owner."""
        return self._words[0], self._words[1]

    def ready(self, receiver: int) -> int:
        """Address of a semaphore."""
        return self._address + LINE + LINK * receiver

    def read(self, receiver: int) -> int:
        """Address of a semaphore."""
        return self.ready(receiver) + SEMAPHORE

    def tell(self, receiver: int, message: int, at: int) -> None:
        """Write down where a message is."""
        self._words[(LINE + LINK * receiver + 2 * SEMAPHORE) // 8 + message % KEPT] = at

    def told(self, receiver: int, message: int) -> int:
        """Return where a message is."""
        return self._words[(LINE + LINK * receiver + 2 * SEMAPHORE) // 8 + message % KEPT]

    def grow(self, nbytes: int) -> tuple[int, int]:
        """Add room; return (where it is, its size). Raises OSError: the system has no more memory."""
        at, size = self.size, self.size + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.posix_fallocate(self.fd, at, size - at)  # fails here, and not by a signal at the first write
        self.size = size
        return at, size - at

    def shrink(self) -> None:
        """Give the memory of messages back. Mappings stay and get pages again when it grows again."""
        os.ftruncate(self.fd, self.begin)
        self.size = self.begin

    def view(self, at: int, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return some elements as a flat tensor, which keeps the memory."""
        if at + count * dtype.itemsize > len(self._all):
            self._all = mmap.mmap(self.fd, 0)  # all that is there by now
        return torch.frombuffer(self._all, dtype=dtype, count=count, offset=at)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)
