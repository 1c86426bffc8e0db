"""How much of every card is taken, by all processes that share them.

Every process has a row in a file that all have mapped: its number, the bytes that it holds of every card, and those of its tensors.
As torch does, it keeps what was freed, until `empty_cache`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import Cards, races

MAX_CARDS, MAX_PROCESSES = 8, 64
COLUMNS = 1 + 2 * MAX_CARDS


class Ledger:
    """What this process and others hold."""

    def __init__(self, cards: Cards) -> None:
        self.capacity = int(cards.gigabytes * (1 << 30))
        size = 8 * COLUMNS * MAX_PROCESSES
        # Without a name it is that of this process and those that it forks.
        self._file = tempfile.TemporaryFile() if cards.ledger is None else cards.ledger.open("a+b")  # noqa: SIM115  (as long as the process)
        os.truncate(self._file.fileno(), size)
        self._table = memoryview(mmap.mmap(self._file.fileno(), size)).cast("q")
        self._own()

    def _own(self) -> None:
        """Take a row. What a process had before it forked is not the child's."""
        self._pid = os.getpid()
        self.storages: dict[tuple[int, int], Held] = {}  # by storage and card
        self.peak = [0] * MAX_CARDS
        with self._alone():
            self._forget_dead()
            self._row = COLUMNS * next(row for row in range(MAX_PROCESSES) if not self._table[row * COLUMNS])
            self._table[self._row] = self._pid

    def allocated(self, card: int) -> int:
        """Bytes of tensors of this process."""
        if os.getpid() != self._pid:
            self._own()
        return self._table[self._row + 1 + MAX_CARDS + card]

    def reserved(self, card: int) -> int:
        """The same, and what this process keeps of freed ones."""
        self.allocated(card)  # this process's row, after a fork
        return self._table[self._row + 1 + card]

    def empty_cache(self) -> None:
        """Give back what this process keeps of freed tensors."""
        for card in range(MAX_CARDS):
            self._table[self._row + 1 + card] = self.allocated(card)

    def free(self, card: int) -> int:
        """Bytes that no living process holds."""
        with self._alone():
            self._forget_dead()
        return max(0, self.capacity - self._taken(card))

    def tensors(self, card: int) -> int:
        """Bytes of tensors of all processes."""
        return sum(self._table[1 + MAX_CARDS + card :: COLUMNS])

    def check(self, card: int, wanted: int) -> None:
        """Raise as a card does that has not got so many bytes."""
        wanted -= self.reserved(card) - self.allocated(card)  # freed before
        if self._taken(card) + wanted > self.capacity and self.free(card) < wanted:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {wanted / (1 << 20):.2f} MiB. GPU {card} has a total capacity of "
                f"{self.capacity / (1 << 30):.2f} GiB of which {self.free(card) / (1 << 20):.2f} MiB is free."
            )

    def note(self, card: int, change: int) -> None:
        """Take bytes, or give them back."""
        self._table[self._row + 1 + MAX_CARDS + card] = held = self.allocated(card) + change
        self._table[self._row + 1 + card] = max(self.reserved(card), held)
        self.peak[card] = max(self.peak[card], held)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While active, no other process changes who has which row."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _taken(self, card: int) -> int:
        return sum(self._table[1 + card :: COLUMNS])

    def _forget_dead(self) -> None:
        for start in range(0, len(self._table), COLUMNS):
            pid = self._table[start]
            if pid and pid != os.getpid() and not _lives(pid):
                for column in range(COLUMNS):
                    self._table[start + column] = 0


@dataclass
class Held:
    """Memory of a card: how many tensors have it, where it is, the stream it was made for and those it was told of."""

    nbytes: int
    address: int
    stream: int
    tensors: int = 0
    recorded: set[int] = field(default_factory=set)


class Hold:
    """Keeps the memory of a tensor taken as long as the tensor has it. Tensors of one storage share it."""

    def __init__(self, tensor: Tensor, card: int) -> None:
        storage = tensor.untyped_storage()
        self._card, self._key = card, (storage._cdata, card)
        LEDGER.allocated(card)  # which of them there are, after a fork
        held = LEDGER.storages.get(self._key)
        if held is None:
            LEDGER.check(card, storage.nbytes())
            LEDGER.note(card, storage.nbytes())
            held = Held(storage.nbytes(), storage.data_ptr(), torch.cuda.current_stream(card).cuda_stream)
            LEDGER.storages[self._key] = held
        held.tensors += 1
        self.held = held

    def __del__(self) -> None:
        LEDGER.allocated(self._card)
        if LEDGER.storages.get(self._key) is not self.held:
            return  # another process's
        self.held.tensors -= 1
        if not self.held.tensors:
            del LEDGER.storages[self._key]
            LEDGER.note(self._card, -self.held.nbytes)
            races.freed(self.held.address, self.held.stream, self.held.recorded)


def start(cards: Cards) -> None:
    """Begin to count."""
    global LEDGER
    LEDGER = Ledger(cards)


LEDGER: Ledger


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(") ")[2][:1] not in "ZX"
    except OSError:
        return False
