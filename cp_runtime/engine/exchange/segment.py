"""Memory of one rank that all ranks of its computer map: its messages, and their offsets.

Other ranks open it by the id of its process, and recognise it by random numbers: in another container or computer that id is
another process.

| at | what |
|---|---|
| 0 | random numbers |
| `LINE` | the last `PLACES` numbers for all ranks |
| `LINKS` + `LINK` * receiver | semaphore "ready", raised for every piece of a message to it |
| + `SEMAPHORE` | semaphore "read", raised by the receiver for every message that it has read |
| + 2 `SEMAPHORE` | places of the last `KEPT` messages to it |
| behind them | messages |
"""

from __future__ import annotations

import mmap
import os
from functools import partial

import torch
from torch import Tensor

from ...pinned import PinnableMemory
from ...system import system
from ...system.native import address_of
from .signals import SEMAPHORE, Signals

# The random numbers have a cache line of their own. A link has 240 offsets behind its semaphores: more messages than are ever
# under way to one receiver, as a rule (`Exchange._send`).
LINE, LINK, PLACES = 64, 2048, 64
LINKS = LINE + 16 * PLACES
KEPT = (LINK - 2 * SEMAPHORE) // 8
VIEWS = 256  # tensors that are kept, as the same memory is used again: making one takes longer than a small message


class Segment:
    """The memory of one rank.

    Args:
        ranks: number of receivers, the rank itself included.
        owner: process and number of it; None = make it.

    Raises:
        OSError, ValueError: there is no such memory, or no room for it.

    Attributes:
        begin: where messages begin.
        ready, read: semaphores, by receiver.
    """

    def __init__(self, ranks: int, signals: Signals, owner: tuple[int, int] | None = None) -> None:
        self.begin = -(-(LINKS + LINK * ranks) // mmap.PAGESIZE) * mmap.PAGESIZE
        if owner is None:
            self.fd = system.memory_fd("context-parallel-exchange")
            system.reserve(self.fd, self.begin)
        else:
            self.fd = system.foreign_fd(*owner)
        self._head = self._all = PinnableMemory(self.fd, self.begin)
        self._words = memoryview(self._head).cast("q")
        if owner is None:
            self._head[:16] = os.urandom(16)
        address = address_of(self._head) + LINKS
        links = range(address, address + LINK * ranks, LINK)
        signal = signals.make if owner is None else partial(signals.open, owner=owner[0])
        self.ready, self.read = [signal(link) for link in links], [signal(link + SEMAPHORE) for link in links]
        self.size = self.begin
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @property
    def token(self) -> tuple[int, int]:
        """Random numbers of its owner."""
        return self._words[0], self._words[1]

    @property
    def number(self) -> int:
        """The number by which other ranks open it."""
        return system.number_of(self.fd)

    def publish_offset(self, receiver: int, message: int, at: int) -> None:
        """Publish the offset of a message."""
        # Before the semaphore is raised, which makes it visible to the receiver: see `signals`.
        self._words[(LINKS + LINK * receiver + 2 * SEMAPHORE) // 8 + message % KEPT] = at

    def offset_of(self, receiver: int, message: int) -> int:
        """Return the offset of a message."""
        return self._words[(LINKS + LINK * receiver + 2 * SEMAPHORE) // 8 + message % KEPT]

    def publish(self, place: int, value: int) -> None:
        """Publish a number of 64 bits. `place`: from 1 on."""
        at = LINE // 8 + 2 * (place % PLACES)
        self._words[at], self._words[at + 1] = value, value ^ place

    def published(self, place: int) -> int | None:
        """Return the number at a place; None as long as there is an earlier one, or half of it. Raises LookupError: it is gone."""
        at = LINE // 8 + 2 * (place % PLACES)
        value, check = self._words[at], self._words[at + 1]
        found = value ^ check
        if found > place and not (found - place) % PLACES:
            raise LookupError
        return value if found == place else None

    def grow(self, nbytes: int) -> tuple[int, int]:
        """Add room; return (where it is, its size). Raises OSError: the system has no more memory."""
        at, size = self.size, self.size + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        system.reserve(self.fd, size, at)
        self.size = size
        return at, size - at

    def shrink(self) -> None:
        """Give the memory of messages back."""
        self._views.clear()
        system.shrink(self.fd, self.begin)
        self.size = self.begin

    def view(self, at: int, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return some elements as a flat tensor, which keeps the memory."""
        key = at, count, dtype
        if (view := self._views.get(key)) is None:
            grew = at + count * dtype.itemsize > len(self._all)
            if grew:
                self._all = PinnableMemory(self.fd, 0)  # all that is there by now
            if grew or len(self._views) == VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # usable in every mode, whichever the caller is in
                view = self._views[key] = torch.frombuffer(self._all, dtype=dtype, count=count, offset=at)
        return view

    def view_for(self, device: torch.device, at: int, count: int) -> Tensor:
        """Return a `view`, pinned for a device's driver where it can be: copies of other memory block the host."""
        view = self.view(at, count)
        if device.type == "cuda":
            self._all.pin()
        return view

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)
