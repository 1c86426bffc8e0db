"""What ranks note about themselves while they work, where the controller can read it at any time without asking."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .channel import SharedBlock

BEAT = 0.25  # seconds between two heartbeats
SILENT = 2.0  # seconds without a heartbeat after which a process must be stopped, or something in it holds the GIL


@dataclass(frozen=True)
class Progress:
    """Where a rank is.

    Args:
        command: sequence number of the command that it works on; 0 = none.
        modules: planned modules that it has entered in that command.
        collectives: collectives that it has begun in that command, as of the last heartbeat.
        loaded: thousandths of a model that it has loaded in that command; None = it loads none.
        beat: time of the last heartbeat, on the clock of `time.monotonic`; 0 = none yet.
        compiling: it compiles a part of a model, the how many-th one of this process; 0 = it does not.
    """

    command: int
    modules: int
    collectives: int
    loaded: int | None
    beat: float
    compiling: int = 0


WORDS = 6  # of a rank: the fields of Progress; a model that is loaded counts from one


class Board:
    """Some words per rank, each written by that rank alone, and one for `CancelPoints`.

    Args:
        block: memory that the controller and all ranks map.
    """

    def __init__(self, block: SharedBlock, world_size: int) -> None:
        words = block.view((WORDS * world_size + 1) * 8).view(torch.int64)
        self.decision = words[-1]
        # A buffer of plain numbers: indexing a tensor takes 50 times as long, and every planned module is counted here.
        self._words = words[:-1].numpy().data

    def begin(self, rank: int, command: int) -> None:
        """The rank begins a command; 0 = it is idle."""
        first = WORDS * rank
        for word in (1, 2, 3, 5):
            self._words[first + word] = 0
        self._words[first] = command

    def enter_module(self, rank: int) -> int:
        """Count one more planned module and return how many there were."""
        modules = self._words[WORDS * rank + 1] + 1
        self._words[WORDS * rank + 1] = modules
        return modules

    def load(self, rank: int, loaded: int | None) -> None:
        """The rank has loaded that many thousandths of a model; None = it is done."""
        self._words[WORDS * rank + 3] = 0 if loaded is None else loaded + 1

    def beat(self, rank: int, collectives: int) -> None:
        """A heartbeat: the rank is alive, and has begun that many collectives."""
        self._words[WORDS * rank + 2] = collectives
        self._words[WORDS * rank + 4] = time.monotonic_ns()

    def compiling(self, rank: int, part: int) -> None:
        """The rank begins to compile a part of a model, the how many-th one; 0 = it is done with it."""
        self._words[WORDS * rank + 5] = part

    def freeze(self) -> None:
        """Keep what was noted last, and let go of the shared memory."""
        self._words = memoryview(bytes(self._words)).cast("q")
        self.decision = self.decision.clone()

    def read(self, rank: int) -> Progress:
        """What the rank noted last."""
        command, modules, collectives, loaded, beat, compiling = self._words[WORDS * rank : WORDS * (rank + 1)]
        return Progress(command, modules, collectives, loaded - 1 if loaded else None, beat / 1e9, compiling)


def resident_bytes(pid: int) -> int:
    """Host memory of a process; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def start_heartbeat(board: Board, rank: int, collectives: Callable[[], int]) -> None:
    """Beat from a thread for as long as the process lives. It pauses while the process is stopped, or something holds the GIL."""

    def run() -> None:
        while True:
            board.beat(rank, collectives())
            time.sleep(BEAT)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()
