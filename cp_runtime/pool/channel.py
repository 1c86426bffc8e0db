"""Transport between the controller and one rank: messages over a socketpair, tensors in shared memory without a name."""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time

import torch
from torch import Tensor

from ..errors import PoolError, PoolTimeout, ProtocolError
from .frames import MAX_HEADER, Frame, pack, unpack
from .messages import Message

_LENGTH = struct.Struct("<Q")


class Closed(Exception):
    """The other end is gone."""


class Channel:
    """Length-prefixed frames over a stream socket. Every receive but that of an idle worker has a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.setblocking(False)
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message, seq: int = 0, nbytes: int = 0, deadline: float | None = None) -> None:
        """Send one frame. Raises Closed or PoolTimeout (`deadline` is on the clock of time.monotonic)."""
        data = pack(message, seq, nbytes)
        view = memoryview(_LENGTH.pack(len(data)) + data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise Closed(str(error)) from error

    def receive(self, deadline: float | None = None) -> Frame:
        """Return the next frame. Raises Closed, PoolTimeout or ProtocolError."""
        while (frame := self.poll()) is None:
            self._wait(select.POLLIN, deadline)
        return frame

    def poll(self) -> Frame | None:
        """Return the next frame if it has arrived completely. A frame that was cut off is never returned."""
        frame = self._take()
        if frame is not None:
            return frame
        try:
            data = self.sock.recv(1 << 18)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Closed(str(error)) from error
        if not data:
            raise Closed("end of stream")
        self._buffer += data
        return self._take()

    def close(self) -> None:
        self.sock.close()

    def _take(self) -> Frame | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_HEADER:
            raise ProtocolError(f"a frame of {length} bytes is above the limit of {MAX_HEADER}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return unpack(data)

    def _wait(self, event: int, deadline: float | None) -> None:
        poller = select.poll()
        poller.register(self.sock, event)
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not poller.poll(None if remaining is None else remaining * 1000):
            raise PoolTimeout("no answer within the deadline")


class SharedBlock:
    """Bytes that two processes map. A memfd: it has no name to leak and does not count against /dev/shm."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("context-parallel", os.MFD_CLOEXEC) if fd is None else fd
        self._mapped: Tensor | None = None

    def view(self, nbytes: int) -> Tensor:
        """Return the first `nbytes` bytes as a uint8 tensor; grow the block where it is smaller. Raises PoolError: there is not
        enough memory."""
        wanted = max(nbytes, mmap.PAGESIZE)
        if self.size < wanted:
            try:
                os.posix_fallocate(self.fd, 0, wanted)  # fails here, and not by a signal at the first write
            except OSError as error:
                raise PoolError(
                    f"no room for {wanted / 2**20:.1f} MB of shared memory between ComfyUI and the workers: {error.strerror}. "
                    "Free memory, raise the limit of the container or session, or use fewer frames or a smaller picture."
                ) from error
        if self._mapped is None or self._mapped.numel() < nbytes:
            self._mapped = torch.frombuffer(mmap.mmap(self.fd, self.size), dtype=torch.uint8)
        return self._mapped[:nbytes]

    @property
    def size(self) -> int:
        """Current size in bytes. Raises PoolError when the block is closed."""
        if self.fd < 0:
            raise PoolError("the worker pool is closed, and its shared memory with it")
        return os.fstat(self.fd).st_size

    def trim(self, limit: int) -> None:
        """Give memory above `limit` bytes back. Mappings stay and get their pages again when the block grows again."""
        if self.size > limit:
            os.ftruncate(self.fd, limit)

    def close(self) -> None:
        """Release the descriptor. Views that are still alive keep their mapping."""
        self._mapped = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
