"""Signals from one rank to another, and processes that may end while one waits for them.

A message is plain bytes, and a processor such as ARM's may show another one a flag before the bytes that were written ahead of it.
Raising and taking a semaphore orders them. Both ways count: the reader raises a second one when it has read, before the writer
writes there again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ...system import system

SEMAPHORE = 64  # bytes: a cache line, so that two semaphores do not slow each other down
SPINS = 100  # polls before sleeping: some 60 µs, as long as waking up takes
POLL = 1e-3  # seconds between two looks where nothing signals
LIVENESS_POLL = 0.05  # seconds between two checks that the other process lives: a dead one raises no semaphore


class Signals:
    """The semaphores of this system. Raises AttributeError: it has none that processes share."""

    def __init__(self) -> None:
        self._system = system.Semaphores()
        self.make, self.open = self._system.make, self._system.open
        self.post, self.try_take = self._system.post, self._system.try_take

    def take(self, semaphore: int, other: system.Process, timeout: float) -> None:
        """Wait until the semaphore is raised, and lower it. Raises OtherEnded or TookTooLong."""
        asleep = partial(self._system.sleep, semaphore, LIVENESS_POLL)
        self._wait(partial(self.try_take, semaphore), asleep, other, timeout)

    def until(self, is_there: Callable[[], bool], other: system.Process, timeout: float) -> None:
        """Wait until a function returns true. Raises OtherEnded or TookTooLong."""

        def asleep() -> bool:
            time.sleep(POLL)
            return is_there()

        self._wait(is_there, asleep, other, timeout)

    def _wait(self, is_there: Callable[[], bool], asleep: Callable[[], bool], other: system.Process, timeout: float) -> None:
        """Wait for what another process does. `asleep`: sleeps, and returns whether it is there."""
        for _ in range(SPINS):
            if is_there():
                return
            system.yield_core()  # where ranks are more than cores, the other one may need this core
        began = time.monotonic()
        while not asleep():
            if other.has_ended:
                if is_there():  # since the sleep, and before the end
                    return
                raise OtherEnded
            if time.monotonic() - began > timeout:
                raise TookTooLong


class OtherEnded(Exception):
    """The other process has ended."""


class TookTooLong(Exception):
    """Nothing came within the timeout."""
