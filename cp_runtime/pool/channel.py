"""Transport between the controller and one rank: messages over a socketpair, tensors in shared memory without a name."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import PoolError, PoolTimeout, ProtocolError
from ..system import system
from .messages import MAX_HEADER, Frame, unpack

_LENGTH = struct.Struct("<Q")


class Closed(Exception):
    """The other end is gone."""


class Channel:
    """Length-prefixed frames over a stream socket. Sending never waits; every receive but that of an idle worker has a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.setblocking(False)
        self._received, self._unsent = bytearray(), bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, frame: bytes) -> None:
        """Send a frame of `pack`: what there is no room for goes with the next `flush` or `receive`. Raises Closed."""
        self._unsent += _LENGTH.pack(len(frame)) + frame
        self.flush()

    def flush(self) -> None:
        """Send more of what has not been sent. Raises Closed."""
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self, deadline: float | None = None) -> Frame:
        """Return the next frame (`deadline` is on the clock of time.monotonic). Raises Closed, PoolTimeout or ProtocolError."""
        while (frame := self.poll()) is None:
            self.flush()
            if not ready({0: self}, None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise PoolTimeout("no answer within the deadline")
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
        self._received += data
        return self._take()

    def close(self) -> None:
        self.sock.close()

    def _take(self) -> Frame | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_HEADER:
            raise ProtocolError(f"a frame of {length} bytes is above the limit of {MAX_HEADER}")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        data = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return unpack(data)


def ready(channels: Mapping[int, Channel], timeout: float | None) -> list[int]:
    """Return the keys of channels that can be read from, or take more of what is unsent; wait for one for `timeout` seconds, None =
    without an end."""
    keys = {channel.fileno(): key for key, channel in channels.items()}
    return [keys[fd] for fd in system.ready_sockets({each.fileno(): each.has_unsent for each in channels.values()}, timeout)]


class SharedBlock:
    """Bytes that two processes map."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = system.memory_fd() if fd is None else fd
        self._mapped: Tensor | None = None

    def view(self, nbytes: int) -> Tensor:
        """Return the first `nbytes` bytes as a uint8 tensor; grow the block where it is smaller. Raises PoolError: there is not
        enough memory."""
        wanted = max(nbytes, mmap.PAGESIZE)
        if self.size < wanted:
            try:
                system.reserve(self.fd, wanted)
            except OSError as error:
                raise PoolError(
                    f"no room for {wanted / 2**20:.1f} MB of shared memory between ComfyUI and the workers: {error.strerror}. "
                    "Free memory, raise the limit of the container or session, or use fewer frames or a smaller picture."
                ) from error
        if self._mapped is None or self._mapped.numel() < nbytes:
            self._mapped = torch.frombuffer(mmap.mmap(self.fd, self.size), dtype=torch.uint8)
        return self._mapped[:nbytes]

    @property
    def address(self) -> tuple[int, int]:
        """Where other processes of this user find it: see `Worker.keep`."""
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
