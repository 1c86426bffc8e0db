"""Memory that ranks share with the controller: notes on their progress, which it reads at any time without asking, the decision to
leave a call together, and the descriptors that they inherit."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..system import system
from .channel import SharedBlock
from .launcher import memory_file, starting

BEAT = 0.25  # seconds between two heartbeats
SILENT = 2.0  # seconds without a heartbeat after which a process must be stopped, or something in it holds the GIL


@dataclass(frozen=True)
class Progress:
    """Where a rank is, in the command that it works on."""

    modules: int = 0  # planned ones that it has entered
    collectives: int = 0  # that it has begun, as of the last heartbeat
    loaded: int | None = None  # thousandths of a model; None = it loads none
    has_loaded: bool = False  # it has begun to bring a model to its device in this command
    beat: float = 0.0  # time of the last heartbeat, on the clock of `time.monotonic`; 0 = none yet
    compiling: int = 0  # the part of a model that it compiles, counted from 1 since its process started; 0 = none


# Words of a rank. Thousandths of a load are kept plus one, or _LOADED after it; a heartbeat in nanoseconds.
MODULES, COLLECTIVES, LOADED, BEAT_AT, COMPILING = range(WORDS := 5)
_LOADED = 1002


class Board:
    """Some words per rank, each written by that rank alone, and one for `CancelPoints`. `block`: memory that the controller and all
    ranks map."""

    def __init__(self, block: SharedBlock, world_size: int) -> None:
        words = block.view((WORDS * world_size + 1) * 8).view(torch.int64)
        self.decision = words[-1]
        # A buffer of plain numbers: indexing a tensor takes 50 times as long, and every planned module is counted here.
        self._words, self._decision = words[:-1].numpy().data, words[-1:].numpy().data

    def begin(self, rank: int) -> None:
        """Note that the rank begins a command, or has ended one."""
        for word in (MODULES, COLLECTIVES, LOADED, COMPILING):
            self._words[WORDS * rank + word] = 0

    def enter_module(self, rank: int) -> int:
        """Count one more planned module and return how many there were."""
        modules = self._words[WORDS * rank + MODULES] + 1
        self._words[WORDS * rank + MODULES] = modules
        return modules

    def load(self, rank: int, loaded: int | None) -> None:
        """Note that the rank has loaded this many thousandths of a model; None = it is done."""
        self._words[WORDS * rank + LOADED] = _LOADED if loaded is None else loaded + 1

    def beat(self, rank: int, collectives: int) -> None:
        """Note that the rank is alive, and how many collectives it has begun."""
        self._words[WORDS * rank + COLLECTIVES] = collectives
        self._words[WORDS * rank + BEAT_AT] = time.monotonic_ns()

    def compiling(self, rank: int, part: int) -> None:
        """Note that the rank compiles a part of a model. `part`: counts from 1; 0 = it has finished."""
        self._words[WORDS * rank + COMPILING] = part

    def undecided(self) -> None:
        """Note that nobody has asked to leave the call that is about to begin. In any thread, in inference mode or not."""
        self._decision[0] = 0

    @property
    def decided(self) -> int:
        """The word for `CancelPoints`."""
        return self._decision[0] if self._decision else 0

    def decide(self, word: int) -> None:
        """Take the word of another machine's board."""
        self._decision[0] = word

    def words(self, rank: int, now: float) -> list[int | float]:
        """Return the notes of a rank for another machine's board: its last heartbeat by its age, as clocks differ."""
        words: list[int | float] = list(self._words[WORDS * rank : WORDS * (rank + 1)])
        words[BEAT_AT] = now - words[BEAT_AT] / 1e9 if words[BEAT_AT] else -1
        return words

    def write(self, rank: int, words: Sequence[int | float]) -> None:
        """Take the notes of a rank from another machine's board."""
        for word, value in enumerate(words):
            value = 0 if word == BEAT_AT and value < 0 else value if word != BEAT_AT else time.monotonic_ns() - value * 1e9
            self._words[WORDS * rank + word] = int(value)

    def freeze(self) -> None:
        """Keep the last notes, and let go of the shared memory."""
        self._words = memoryview(bytes(self._words)).cast("q")
        self.decision, self._decision = self.decision.clone(), self._words[:0]

    def read(self, rank: int) -> Progress:
        modules, collectives, loaded, beat, compiling = self._words[WORDS * rank : WORDS * (rank + 1)]
        return Progress(
            modules=modules,
            collectives=collectives,
            loaded=loaded - 1 if 0 < loaded < _LOADED else None,
            has_loaded=loaded > 0,
            beat=beat / 1e9,
            compiling=compiling,
        )


def start_heartbeat(board: Board, rank: int, collectives: Callable[[], int]) -> None:
    """Beat from a thread for as long as the process lives. It pauses while the process is stopped, or something holds the GIL."""

    def run() -> None:
        while True:
            board.beat(rank, collectives())
            time.sleep(BEAT)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()


_NEVER = 2**62
_POLL = 0.001


class CancelPoints:
    """Numbered places of a call (1, 2, ...) at which all ranks leave it, or none does.

    At each place rank 0 decides about the *next* one, or one `lead` places ahead, so that the decision lies there before the
    others arrive: they wait only when they are farther ahead of rank 0. Waiting at every place would add up the differences in
    speed between ranks that a batch axis lets run apart.

    Args:
        word: one int64 in memory that all ranks map, 0 when a call begins. Its absolute value is the last place that rank 0 has
            passed; where it is negative, all leave at the place that is decided there.
        rank: this rank.
    """

    def __init__(self, word: Tensor, rank: int) -> None:
        self._word, self._rank, self._passed = word, rank, 0

    def restart(self) -> None:
        self._passed = 0

    def leave(self, asked: Callable[[], bool], lead: int = 1) -> bool:
        """Return whether to leave at this place, alike on all ranks.

        Args:
            asked: whether the user cancelled; called by rank 0.
            lead: places that another rank may be ahead of rank 0, the same in all of a call.
        """
        self._passed += 1
        while abs(decision := int(self._word)) < self._passed - lead:
            time.sleep(_POLL)
        if decision < 0:
            return self._passed == lead - decision
        if self._rank == 0:
            self._word.fill_(-self._passed if asked() else self._passed)
        return False

    def pass_next(self, lead: int = 1) -> bool:
        """Return whether it is decided that all ranks pass the next place. `lead`: as for `leave`."""
        decision = int(self._word)
        return abs(decision) > self._passed - lead and not (decision < 0 and self._passed + 1 == lead - decision)

    def end(self) -> None:
        """Note that this rank has left the call. Once rank 0 has left, nothing new is decided and nobody waits."""
        if self._rank == 0 and int(self._word) >= 0:
            self._word.fill_(_NEVER)


class Inherited:
    """Memory that ranks share with the controller, and files that they write.

    Attributes:
        request, response: messages to the ranks, and results of rank 0.
        board: what ranks note while they work.
        store: descriptor of the file that they meet in.
        stacks: those of the files for their stacks, by rank.

    Raises:
        PoolError: the system has no descriptors or no memory for it.
    """

    def __init__(self, world_size: int) -> None:
        with contextlib.ExitStack() as opened, starting():
            self.store = opened.enter_context(system.store_file())
            self.stacks = [opened.enter_context(memory_file()).fileno() for _ in range(world_size)]
            self.request, self.response, self._board = (opened.enter_context(contextlib.closing(SharedBlock())) for _ in range(3))
            self.board = Board(self._board, world_size)
            self._cleanup = opened.pop_all()

    def descriptors(self, rank: int) -> dict[str, int]:
        """Return the descriptors for a rank, by their names in its spec."""
        return {
            "request_fd": self.request.fd,
            "response_fd": self.response.fd,
            "board_fd": self._board.fd,
            "store_fd": self.store,
            "stacks_fd": self.stacks[rank],
        }

    def close(self) -> None:
        """Release all but the last words on the board: an error may keep a pool for a while, and ask it for its progress."""
        self.board.freeze()
        self._cleanup.close()
