"""What the ranks of one start inherit from the controller's process, as descriptors: nothing of it has a name, or outlives both."""

from __future__ import annotations

import contextlib
import os

from .board import Board
from .channel import SharedBlock
from .launcher import memory_file
from .limits import starting


class Inherited:
    """Memory that ranks share with the controller, files that they write, and a pipe that closes at its end.

    Attributes:
        request, response: messages to the ranks, and results of rank 0.
        board: what ranks note while they work.
        stacks: descriptors of the files for their stacks, by rank.

    Raises:
        PoolError: the system has no descriptors or no memory for it.
    """

    def __init__(self, world_size: int) -> None:
        self._cleanup = contextlib.ExitStack()
        with contextlib.ExitStack() as opened, starting():
            self._store, *self.stacks = (self._memory_file(opened) for _ in range(1 + world_size))
            self.request, self.response, self._board = (opened.enter_context(contextlib.closing(SharedBlock())) for _ in range(3))
            self.board = Board(self._board, world_size)
            self._death_read, write = os.pipe()
            opened.callback(os.close, self._death_read)
            opened.callback(os.close, write)
            self._cleanup = opened.pop_all()

    @staticmethod
    def _memory_file(opened: contextlib.ExitStack) -> int:
        fd = memory_file()
        opened.callback(os.close, fd)
        return fd

    def descriptors(self, rank: int) -> dict[str, int]:
        """Those for a rank, by their names in its spec."""
        return {
            "request_fd": self.request.fd,
            "response_fd": self.response.fd,
            "board_fd": self._board.fd,
            "death_fd": self._death_read,
            "store_fd": self._store,
            "stacks_fd": self.stacks[rank],
        }

    def close(self) -> None:
        """Release all but the last words on the board: an error may keep a pool for a while, and ask it for its progress."""
        self.board.freeze()
        self._cleanup.close()
