"""Memory that ComfyUI's process and the ranks of one computer map: tensors of messages, and the file that ranks meet in."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PoolError
from ..system import system
from ..system.interfaces import listening_port
from .frames import Buffer
from .launcher import starting

LOOPBACK = "127.0.0.1"
# Of memory for messages, and for results. More is given back: that of a 720p video's result is 0.9 GB.
KEEP_BYTES = 64 << 20
_POLL = 5e-4  # seconds between two polls for a message


class SharedBlock:
    """Bytes that two processes map. `is_file`: of a file on a disk."""

    def __init__(self, fd: int | None = None, *, is_file: bool = False) -> None:
        self.fd, self.is_file = system.memory_fd() if fd is None else fd, is_file
        self._mapped: Tensor | None = None

    def view(self, nbytes: int) -> Tensor:
        """Return the first `nbytes` bytes as a uint8 tensor; grow the block where it is smaller. Raises PoolError: there is not
        enough memory."""
        wanted = max(nbytes, mmap.PAGESIZE)  # an empty file cannot be mapped
        if self.size < wanted:
            try:
                system.reserve(self.fd, wanted)
            except OSError as error:
                raise PoolError(
                    f"no room for {wanted / 2**20:.1f} MB of shared memory between ComfyUI and the workers: {error.strerror}. "
                    "Free memory, raise the limit of the container or session, or use fewer frames or a smaller picture."
                ) from error
        # A mapping has the size of its file at that time: once the file has grown, it takes another one.
        if self._mapped is None or self._mapped.numel() < nbytes:
            self._mapped = torch.frombuffer(mmap.mmap(self.fd, self.size), dtype=torch.uint8)
        return self._mapped[:nbytes]

    @property
    def pages(self) -> Tensor:
        """All of it as a uint8 tensor, to be read: what is written there stays here."""
        return torch.frombuffer(system.file_pages(self.fd), dtype=torch.uint8)

    @property
    def address(self) -> tuple[int, int]:
        """Where other processes of this user find it: a process id, and a number for `system.foreign_fd`."""
        return os.getpid(), system.number_of(self.fd)

    @property
    def size(self) -> int:
        """Current size in bytes. Raises PoolError when the block is closed."""
        if self.fd < 0:
            raise PoolError("the worker pool is closed, and its shared memory with it")
        return os.fstat(self.fd).st_size

    def trim(self, limit: int) -> None:
        """Give memory above `limit` bytes back."""
        if self.size > limit:
            system.shrink(self.fd, limit)

    def close(self) -> None:
        """Release the descriptor. Views that are still alive keep their mapping."""
        self._mapped = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Relay:
    """Shares the bytes of messages among the ranks of another computer: one receives them, so they cross the network once.

    Args:
        address: where that rank has it; None = this is that rank.

    Raises:
        OSError: it cannot be opened from here.
    """

    def __init__(self, address: tuple[int, int] | None = None) -> None:
        self._block = SharedBlock(None if address is None else system.foreign_fd(*address))
        self._last = self._block.view(torch.int64.itemsize).view(torch.int64)  # number of the message that is complete
        self.address = self._block.address

    def put(self, seq: int, body: Buffer) -> None:
        """Pass on the bytes of a message. All ranks have finished with the previous one. `seq`: its number."""
        self._block.trim(KEEP_BYTES)
        self._block.view(mmap.PAGESIZE + len(body))[mmap.PAGESIZE :].copy_(torch.frombuffer(body, dtype=torch.uint8))
        self._last.fill_(seq)

    def get(self, seq: int, nbytes: int) -> Tensor:
        """Wait for the bytes of a message, which stay until the next one."""
        while self._last.item() != seq:
            time.sleep(_POLL)
        return self._block.view(mmap.PAGESIZE + nbytes)[mmap.PAGESIZE :]


class Shared:
    """What a pool and its ranks share. Raises PoolError: the system has no descriptors or no memory for it.

    Attributes:
        request, response: tensors of messages to the ranks, and results of rank 0.
        store: descriptor of the file that they meet in.
    """

    def __init__(self) -> None:
        self._listening: Any = None
        with contextlib.ExitStack() as opened, starting():
            self.store = opened.enter_context(system.store_file())
            self.request, self.response = (opened.enter_context(contextlib.closing(SharedBlock())) for _ in range(2))
            self._cleanup = opened.pop_all()

    def store_port(self, world_size: int) -> int:
        """Return the port of a store on loopback, in place of the file, for ranks that cannot open that. There is one."""
        if self._listening is not None:
            return int(self._listening.port)
        port, listener = listening_port(LOOPBACK)  # torch's own listens on all interfaces
        self._listening = dist.TCPStore(
            LOOPBACK, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener
        )
        return port

    @property
    def addresses(self) -> dict[str, tuple[int, int]]:
        """Where ranks find them, by their names in a rank's spec: see `SharedBlock.address`."""
        store = os.getpid(), system.number_of(self.store)
        return {"request": self.request.address, "response": self.response.address, "store": store}

    def close(self) -> None:
        self._listening = None
        self._cleanup.close()
