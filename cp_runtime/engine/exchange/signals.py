"""Semaphores in memory that two processes map, and processes that may end while one waits for them.

A message is plain bytes, and a processor such as ARM's may show another one a flag before the bytes that were written ahead of it.
Raising and taking a semaphore orders them: POSIX has `sem_post` and its waits synchronise memory (4.12), and glibc makes them a
release and an acquire. Both ways count: the reader raises a second one when it has read, before the writer writes there again.
None enters the kernel unless somebody sleeps.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from typing import Any

SEMAPHORE = 64  # bytes for one: 32 of glibc, alone in a line of the cache
SPINS = 100  # looks before sleeping: some 60 µs, as long as waking up takes
LOOK = 0.05  # seconds between two looks at whether the other process still lives


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)  # gives up the GIL while it sleeps
_quick = ctypes.PyDLL(None)


def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> Callable[..., int]:
    found: Any = getattr(library, name)
    found.argtypes = arguments
    function: Callable[..., int] = found
    return function


class Semaphores:
    """The functions of libc, which take the address of a semaphore. Raises AttributeError: libc is not glibc 2.30 or newer."""

    def __init__(self) -> None:
        address = ctypes.c_void_p
        self._init = _function(_quick, "sem_init", address, ctypes.c_int, ctypes.c_uint)
        self._wait = _function(_libc, "sem_clockwait", address, ctypes.c_int, ctypes.POINTER(_Time))
        self.post = _function(_quick, "sem_post", address)
        self._try = _function(_quick, "sem_trywait", address)

    def make(self, address: int) -> None:
        if self._init(address, 1, 0):
            raise OSError("no semaphores between processes")

    def try_take(self, address: int) -> bool:
        return self._try(address) == 0

    def take(self, address: int, other: Process, timeout: float) -> None:
        """Wait until the semaphore is raised, and lower it. Raises OtherEnded or TookTooLong."""
        for _ in range(SPINS):
            if self._try(address) == 0:
                return
            os.sched_yield()  # where ranks are more than cores, the other one may need this core
        began = time.monotonic()
        while not self._sleep(address):
            if other.has_ended and not self.try_take(address):
                raise OtherEnded
            if time.monotonic() - began > timeout:
                raise TookTooLong

    def _sleep(self, address: int) -> bool:
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(LOOK * 1e9)
        if self._wait(address, time.CLOCK_MONOTONIC, _Time(*divmod(until, 1_000_000_000))) == 0:
            return True
        if (code := ctypes.get_errno()) not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))
        return False


class OtherEnded(Exception):
    """The process that one waits for is gone."""


class TookTooLong(Exception):
    """Nothing came within the timeout."""


class Process:
    """A process of this computer. Raises OSError: it is not there."""

    def __init__(self, pid: int) -> None:
        # Of this process, even when another one has its number. Many builds of Python lack `os.pidfd_open`.
        self._folder = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def has_ended(self) -> bool:
        try:
            with open(os.open("stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder), "rb") as file:
                return file.read().rpartition(b") ")[2][:1] in b"ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True

    def __del__(self) -> None:
        if hasattr(self, "_folder"):
            os.close(self._folder)
