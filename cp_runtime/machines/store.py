"""The file in which ranks meet, on every computer the same: what ranks append to one is appended to the others.

torch's `FileStore` only ever appends to its file, whole entries and under a lock. So the copies need no look inside, and no port.
Sums (`Store.add`) of ranks on several computers would not add up; neither gloo nor NCCL uses them to connect.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ..errors import ProtocolError

_MOST = 1 << 24  # bytes; a group takes some kilobytes per rank


class StoreFile:
    """What one connection has not told the other end of a file that ranks meet in. `fd`: of the file, which stays the caller's."""

    def __init__(self, fd: int) -> None:
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)  # with a lock of its own
        self._seen, self._untold = 0, b""

    def news(self) -> bytes:
        """Return what was appended since the last call, but not by `append`."""
        if os.fstat(self._fd).st_size > self._seen:
            with self._locked():
                self._look()
        news, self._untold = self._untold, b""
        return news

    def append(self, data: bytes | bytearray) -> None:
        if self._seen + len(data) > _MOST:
            raise ProtocolError(f"ranks that meet have told each other more than {_MOST} bytes")
        with self._locked():
            self._look()
            self._seen += os.pwrite(self._fd, data, self._seen)

    def close(self) -> None:
        os.close(self._fd)

    def _look(self) -> None:
        size = os.fstat(self._fd).st_size
        self._untold += os.pread(self._fd, size - self._seen, self._seen)
        self._seen = size

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # Windows has none, and imports this module all the same

        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
