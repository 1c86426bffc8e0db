"""How much of every card is taken, by all processes that share them.

Every process has a row in a file that all have mapped: its number, the bytes that its tensors have of every card, and those that it
holds in all: with a context, what groups take, and what torch keeps of freed tensors until its cache is emptied. Beside that, how
much of it is pages that DynamicVRAM has mapped (`dynamic_vram`).
"""

import fcntl
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import Cards, races

MAX_CARDS, MAX_PROCESSES = 8, 64
COLUMNS = 1 + 4 * MAX_CARDS
CONTEXT = 512 << 20  # bytes that CUDA takes of a card for every process that touches it
GROUP = 16 << 20  # and NCCL of a rank's card for every group that it is in
AcceleratorError = getattr(torch, "AcceleratorError", RuntimeError)  # of torch 2.8 and later


class Ledger:
    """What this process and others hold.

    Attributes:
        opened: which process was the first to touch a card; those that it forks must not.
        failed: cards on which a kernel of this process has failed.
        type: of the cards, as torch names it.
        module: torch's functions for them.
        backend: torch's communication library for them.
        make_room: gives back some of the pages that this process has mapped of a card; False where it has none that may go.
    """

    module: Any
    backend: str
    make_room: Callable[[int], bool] = staticmethod(lambda card: False)

    def __init__(self, cards: Cards) -> None:
        self.type = cards.type
        self.capacities = [int(kind.gigabytes * (1 << 30)) for kind in cards.each()]
        size = 8 * COLUMNS * MAX_PROCESSES
        # Without a name it is that of this process and those that it forks.
        self._file = tempfile.TemporaryFile() if cards.ledger is None else cards.ledger.open("a+b")  # noqa: SIM115  (as long as the process)
        os.truncate(self._file.fileno(), size)
        self._table = memoryview(mmap.mmap(self._file.fileno(), size)).cast("q")
        self.opened: int | None = None
        self._own()

    def _own(self) -> None:
        """Take a row. What a process had before it forked is not the child's."""
        self._pid = os.getpid()
        self.storages: dict[tuple[int, int], Held] = {}  # by storage and card
        self.peak = [0] * MAX_CARDS
        self.failed: set[int] = set()
        with self._alone():
            self._forget_dead()
            self._row = COLUMNS * next(row for row in range(MAX_PROCESSES) if not self._table[row * COLUMNS])
            self._table[self._row] = self._pid

    def touch(self, card: int, more: int = 0) -> None:
        """Have a context on a card, and some bytes that no tensor has.

        Raises:
            RuntimeError: this process cannot.
        """
        self._mine()
        if self.opened not in (None, self._pid):
            raise RuntimeError(
                f"Cannot re-initialize {self.type.upper()} in forked subprocess. To use it with multiprocessing, you must use the "
                "'spawn' start method"
            )
        if card in self.failed:
            raise AcceleratorError(f"{self.type.upper()} error: device-side assert triggered")
        self.opened = self._pid
        fixed = self._row + 1 + 2 * MAX_CARDS + card
        new = more if self._table[fixed] else more + CONTEXT
        if new:
            self.check(card, new)
            self._table[fixed] += new
            self._table[self._row + 1 + MAX_CARDS + card] += new

    def map(self, card: int, change: int) -> None:
        """Map bytes of a card that are not torch's, or give them back."""
        self.touch(card, change)
        self._table[self._row + 1 + 3 * MAX_CARDS + card] += change

    def mapped(self, card: int) -> int:
        """Bytes that all living processes have mapped."""
        with self._alone():
            self._forget_dead()
        return sum(self._table[1 + 3 * MAX_CARDS + card :: COLUMNS])

    def lend(self, tensor: Tensor, card: int) -> None:
        """Have a tensor hold nothing, since its memory is counted where it was mapped."""
        storage = tensor.untyped_storage()
        stream = self.module.current_stream(card).cuda_stream
        self.storages[storage._cdata, card] = Held(0, storage.data_ptr(), stream)

    def allocated(self, card: int) -> int:
        """Bytes that tensors of this process hold."""
        self._mine()
        return self._table[self._row + 1 + card]

    def reserved(self, card: int) -> int:
        """Bytes that torch holds of a card in this process: as many as tensors ever had, since the cache was emptied."""
        self._mine()
        return self._table[self._row + 1 + MAX_CARDS + card] - self._table[self._row + 1 + 2 * MAX_CARDS + card]

    def empty_cache(self) -> None:
        """Give back what no tensor has."""
        for card in range(MAX_CARDS):
            self._table[self._row + 1 + MAX_CARDS + card] -= self.reserved(card) - self.allocated(card)

    def free(self, card: int) -> int:
        """Bytes that no living process holds."""
        with self._alone():
            self._forget_dead()
        return self._untaken(card)

    def _untaken(self, card: int) -> int:
        """Bytes that no process holds, living or dead."""
        return max(0, self.capacities[card] - sum(self._table[1 + MAX_CARDS + card :: COLUMNS]))

    def _has(self, card: int, wanted: int) -> bool:
        """Whether so many bytes are free. Who is dead is only asked where it matters, since every operation comes by here."""
        return wanted <= self._untaken(card) or wanted <= self.free(card)

    def tensors(self, card: int) -> int:
        """Bytes that tensors of all living processes hold."""
        with self._alone():
            self._forget_dead()
        return sum(self._table[1 + card :: COLUMNS])

    def cached(self, card: int) -> int:
        """Bytes that all living processes keep of tensors that they freed."""
        fixed = sum(self._table[1 + 2 * MAX_CARDS + card :: COLUMNS])
        return self.capacities[card] - self.free(card) - fixed - self.tensors(card)

    def contexts(self) -> dict[int, list[int]]:
        """Return which cards every living process has touched, by its number."""
        with self._alone():
            self._forget_dead()
        rows = (self._table[start : start + COLUMNS] for start in range(0, len(self._table), COLUMNS))
        return {row[0]: [card for card in range(MAX_CARDS) if row[1 + MAX_CARDS + card]] for row in rows if row[0]}

    def check(self, card: int, wanted: int) -> None:
        """Raise as a card does that has not got so many bytes, and no pages that may go."""
        while not self._has(card, wanted) and self.make_room(card):
            pass
        if not self._has(card, wanted):
            raise torch.OutOfMemoryError(
                f"{self.type.upper()} out of memory. Tried to allocate {wanted / (1 << 20):.2f} MiB. GPU {card} has a total "
                f"capacity of {self.capacities[card] / (1 << 30):.2f} GiB of which {self.free(card) / (1 << 20):.2f} MiB is free."
            )

    def fits(self, card: int, wanted: int) -> None:
        """Make sure that a tensor of so many bytes fits: into torch's own, or else beside it, without what no tensor has."""
        if self.allocated(card) + wanted > self.reserved(card):
            if not self._has(card, self.allocated(card) + wanted - self.reserved(card)):
                self.empty_cache()
            self.check(card, self.allocated(card) + wanted - self.reserved(card))

    def note(self, card: int, change: int) -> None:
        """Take bytes, or give them back."""
        held = self.allocated(card) + change
        self._table[self._row + 1 + card] = held
        self._table[self._row + 1 + MAX_CARDS + card] += max(0, held - self.reserved(card))
        self.peak[card] = max(self.peak[card], held)

    def _mine(self) -> None:
        if os.getpid() != self._pid:
            self._own()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While active, no other process changes who has which row."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

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

    held: Held | None = None

    def __init__(self, tensor: Tensor, card: int) -> None:
        storage = tensor.untyped_storage()
        self._card, self._key = card, (storage._cdata, card)
        LEDGER.touch(card)
        held = LEDGER.storages.get(self._key)
        if held is None:
            LEDGER.fits(card, storage.nbytes())
            LEDGER.note(card, storage.nbytes())
            held = Held(storage.nbytes(), storage.data_ptr(), LEDGER.module.current_stream(card).cuda_stream)
            LEDGER.storages[self._key] = held
        held.tensors += 1
        self.held = held

    def __del__(self) -> None:
        LEDGER.allocated(self._card)
        if self.held is None or LEDGER.storages.get(self._key) is not self.held:
            return  # there was none, or it is another process's
        self.held.tensors -= 1
        if not self.held.tensors:
            del LEDGER.storages[self._key]
            LEDGER.note(self._card, -self.held.nbytes)
            if self.held.nbytes:
                races.freed(self.held.address, self.held.stream, self.held.recorded)
            else:
                races.forget(self.held.address)


def start(cards: Cards) -> None:
    """Begin to count."""
    global LEDGER
    LEDGER = Ledger(cards)
    if cards.type == "npu":  # what importing torch_npu does
        torch.utils.backend_registration._setup_privateuseone_for_python_backend("npu", ModuleType("torch.npu"))
        dist.Backend.register_backend("hccl", lambda *_: None, devices=["npu"])
        sys.modules["torch_npu"] = ModuleType("torch_npu")
    LEDGER.module, LEDGER.backend = torch.get_device_module(cards.type), dist.get_default_backend_for_device(cards.type)


LEDGER: Ledger


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(") ")[2][:1] not in "ZX"
    except OSError:
        return False
