"""Frames over pipes, between ComfyUI's process and one rank: the rank reads them from its standard input, and writes to its output.

A frame is a header, which is JSON, and bytes that belong to it. An urgent one is handled at once, whatever its receiver does. No
library is needed here: a rank can be spoken to before it has imported any.
"""

from __future__ import annotations

import os
import queue
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

MAX_HEADER = 64 << 20  # bytes
_HEAD = struct.Struct("<QQ?")  # bytes of the header, bytes behind it, whether it is urgent
_MAX_CHUNK, _MIN_READ = 1 << 20, 1 << 16  # bytes of a write or a read, at most and at least

Buffer = bytes | bytearray | memoryview


class Frame(NamedTuple):
    header: bytes
    body: Buffer = b""
    urgent: bool = False


class Malformed(Exception):
    """What came is no frame: nobody knows where the next one begins."""


def write(fd: int, frame: Frame) -> None:
    """Write a frame into a pipe. Raises OSError: nobody reads it any more."""
    for part in _parts(frame):
        _write(fd, part)


def _parts(frame: Frame) -> tuple[memoryview, memoryview]:
    head = _HEAD.pack(len(frame.header), len(frame.body), frame.urgent)
    return memoryview(head + frame.header), memoryview(frame.body)


def _write(fd: int, left: memoryview) -> memoryview:
    """Write bytes to a non-blocking pipe; return those without room in it."""
    try:
        while left:
            left = left[os.write(fd, left[:_MAX_CHUNK]) :]
    except BlockingIOError:
        pass
    return left


class Reader:
    """Reads frames from a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd, self._left = fd, bytearray()

    def read(self) -> Frame | None:
        """Wait for a frame; None at the end. One that was cut off is never returned. Raises Malformed."""
        head = self._take(_HEAD.size)
        if head is None:
            return None
        length, nbytes, urgent = _HEAD.unpack(head)
        if length > MAX_HEADER:
            raise Malformed(f"a header of {length} bytes is above the limit of {MAX_HEADER}")
        header = self._take(length)
        body = None if header is None else self._take(nbytes)
        return None if header is None or body is None else Frame(bytes(header), body, urgent)

    def skip_to(self, mark: bytes) -> bool:
        """Skip what comes before a mark, and that; False: it does not come."""
        while mark not in self._left:
            if self._take(len(self._left) + 1, keep=True) is None:
                return False
        del self._left[: self._left.index(mark) + len(mark)]
        return True

    def _take(self, count: int, keep: bool = False) -> bytearray | None:
        while len(self._left) < count:
            try:
                piece = os.read(self._fd, max(_MIN_READ, min(count - len(self._left), _MAX_CHUNK)))
            except OSError:  # Windows has this for the end
                return None
            if not piece:
                return None
            self._left += piece
        taken = self._left[:count]
        if not keep:
            del self._left[:count]
        return taken


class Outbox:
    """Writes frames into a pipe. `put` never waits, whatever the reader does: what the pipe does not take at once is written by a
    thread. Where a system cannot say how much that is, all of it."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lock, self._behind = fd, threading.Lock(), 0  # pieces that the thread has to write
        self._pieces: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._writes_directly = sys.platform != "win32"
        if self._writes_directly:
            os.set_blocking(fd, False)
        threading.Thread(target=self._run, name="context-parallel-frames", daemon=True).start()

    def put(self, frame: Frame) -> None:
        """Write a frame. Nothing happens where its reader has ended, or after `close`."""
        with self._lock:
            for part in _parts(frame):
                # Behind what the thread has yet to write, or this frame would overtake it.
                if not self._behind and self._writes_directly:
                    part = self._try(part)
                if part:
                    self._behind += 1
                    self._pieces.put(part)

    def close(self) -> None:
        """Close the pipe once all is written."""
        with self._lock:
            self._writes_directly = False
            self._pieces.put(None)

    def _try(self, left: memoryview) -> memoryview:
        """Write what the pipe takes at once; return the rest."""
        try:
            left = _write(self._fd, left)
        except OSError:  # its reader has ended
            return memoryview(b"")
        if left:
            os.set_blocking(self._fd, True)  # for the thread
        return left

    def _run(self) -> None:
        try:
            while (piece := self._pieces.get()) is not None:
                _write(self._fd, piece)
                with self._lock:
                    self._behind -= 1
                    if not self._behind and self._writes_directly:
                        os.set_blocking(self._fd, False)
        except OSError:  # its reader has ended
            pass
        finally:
            with self._lock:
                self._writes_directly, self._behind = False, 1
                os.close(self._fd)


class Inbox:
    """A rank's end of its pipes. Its standard input is empty from now on, and what libraries print goes to its standard error.

    Args:
        ended: called at the end of the input: nobody needs this process any more.
        urgent: called with every urgent frame, in the reading thread; may be replaced.
        arrived: called there with every other frame, before `get` returns it; may be replaced.
    """

    def __init__(self, ended: Callable[[], None], urgent: Callable[[Frame], None], arrived: Callable[[Frame], None]) -> None:
        self._input, self._output = _taken(0), _taken(1)
        if hasattr(os, "register_at_fork"):  # a child would keep the pipes open when this process has ended
            os.register_at_fork(after_in_child=self._close_in_child)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self.urgent, self.arrived = urgent, arrived
        self._frames: queue.SimpleQueue[Frame | Malformed] = queue.SimpleQueue()
        self._writing, self._ended, self._last = threading.Lock(), ended, time.monotonic()
        threading.Thread(target=self._run, name="frames", daemon=True).start()

    def end_on_silence(self, seconds: float) -> None:
        """From now on, treat a silence of this many seconds as the end of the input."""

        def run() -> None:
            while time.monotonic() - self._last < seconds:
                time.sleep(seconds / 10)
            self._ended()

        threading.Thread(target=run, name="silence", daemon=True).start()

    def get(self, timeout: float | None = None) -> Frame:
        """Wait for a frame that is not urgent. Raises queue.Empty: there is none within the time in seconds; Malformed."""
        frame = self._frames.get(timeout=timeout)
        if isinstance(frame, Malformed):
            raise frame
        return frame

    def begin(self, mark: bytes) -> None:
        """Write a mark before the first frame."""
        os.write(self._output, mark)

    def send(self, frame: Frame) -> None:
        """Send a frame, in any thread. Ends this process if the other side has ended."""
        with self._writing:
            try:
                write(self._output, frame)
            except OSError:
                self._ended()

    def _run(self) -> None:
        reader = Reader(self._input)
        try:
            while (frame := reader.read()) is not None:
                self._last = time.monotonic()
                if frame.urgent:
                    self.urgent(frame)
                else:
                    self.arrived(frame)
                    self._frames.put(frame)
        except Malformed as error:
            self._frames.put(error)
        else:
            self._ended()

    def _close_in_child(self) -> None:
        os.close(self._input)
        os.close(self._output)


def _taken(fd: int) -> int:
    """Return a descriptor of this process alone in place of a standard one."""
    own = os.dup(fd)
    if sys.platform == "win32":
        import msvcrt

        msvcrt.setmode(own, os.O_BINARY)
    return own
