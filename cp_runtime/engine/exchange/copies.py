"""Copies between a device and shared memory, beside what the device computes.

The host waits for none of them: a thread does, and then tells others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor


class Copies:
    """Copies of one device: those away from it in one stream, those to it in another one."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device, self._away, self._back = device, self._module.Stream(device), self._module.Stream(device)
        self._started: SimpleQueue[tuple[Any, Callable[[], None]]] = SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="context-parallel-copies", daemon=True).start()

    def mark(self) -> Any:
        """Return an event behind everything that the current stream has been given."""
        return self._module.current_stream(self._device).record_event()

    def start(self, target: Tensor, source: Tensor, after: Any, then: Callable[[], None]) -> Any:
        """Start a copy behind an event; return the one behind the copy. `then`: what the thread calls when it is done.

        Raises:
            RuntimeError: one before it failed.
        """
        if self._error is not None:
            raise RuntimeError(f"a copy between {self._device} and shared memory failed") from self._error
        stream, ours = (self._away, source) if target.is_cpu else (self._back, target)
        with self._module.stream(stream):
            stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done = stream.record_event()
        ours.record_stream(stream)
        self._started.put((done, then))
        return done

    def wait_for(self, done: Any) -> None:
        """Have the current stream wait for an event."""
        self._module.current_stream(self._device).wait_event(done)

    def _run(self) -> None:
        self._module.set_device(self._device)
        while True:
            done, then = self._started.get()
            try:
                done.synchronize()
                then()
            except BaseException as error:  # noqa: BLE001  (raised by the next copy)
                self._error = error
            del done, then  # what they keep must not wait for the next copy


copies_of = cache(Copies)
"""Return the copies of a device."""
