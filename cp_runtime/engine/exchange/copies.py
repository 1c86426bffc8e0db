"""Copies messages into and out of shared memory. CPU copies are synchronous; device copies overlap with compute.

The host never waits for a device: a thread does, and then signals the receivers.
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
    """Copies of the CPU: each is done when `start` returns. Its events are None."""

    def mark(self) -> Any:
        """Return an event behind everything that the device has been given."""

    def start(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Start a copy behind an event; return the one behind the copy."""
        target.copy_(source)

    def then(self, done: Any, call: Callable[[], None]) -> None:
        """Call a function when the device has come to an event."""
        call()

    def wait_for(self, done: Any) -> None:
        """Make later work of the device wait for an event."""


class DeviceCopies(Copies):
    """Copies of a device: those away from it in one stream, those to it in another one.

    Raises:
        RuntimeError: from `start`, where a copy before it failed.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        # A stream per direction: a bus carries both at once, and what is sent does not wait for what is received.
        self._device, self._away, self._back = device, self._module.Stream(device), self._module.Stream(device)
        self._calls: SimpleQueue[tuple[Any, Callable[[], None]]] = SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="context-parallel-copies", daemon=True).start()

    def mark(self) -> Any:
        return self._module.current_stream(self._device).record_event()

    def start(self, target: Tensor, source: Tensor, after: Any) -> Any:
        if self._error is not None:
            raise RuntimeError(f"a copy between {self._device} and shared memory failed") from self._error
        stream, ours = (self._away, source) if target.is_cpu else (self._back, target)
        with self._module.stream(stream):
            stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done = stream.record_event()
        ours.record_stream(stream)  # or the allocator may reuse the tensor's memory before the copy is over
        return done

    def then(self, done: Any, call: Callable[[], None]) -> None:
        self._calls.put((done, call))

    def wait_for(self, done: Any) -> None:
        self._module.current_stream(self._device).wait_event(done)

    def _run(self) -> None:
        self._module.set_device(self._device)
        while True:
            done, call = self._calls.get()
            try:
                done.synchronize()
                call()
            except BaseException as error:  # noqa: BLE001  (raised by the next copy)
                self._error = error
            del done, call  # what they keep must not wait for the next copy


CPU_COPIES = Copies()


@cache
def copies_of(device: torch.device) -> Copies:
    """Return the copies of a device."""
    return CPU_COPIES if device.type == "cpu" else DeviceCopies(device)
