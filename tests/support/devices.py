"""A stand-in for an accelerator's clock, for arithmetic on times."""

from __future__ import annotations

import time
from typing import Any


class SlowDevice:
    """An accelerator whose work takes its time while the host goes on: what `torch.get_device_module` returns.

    Attributes:
        held: bytes that are allocated.
        peak: the most that were.
    """

    def __init__(self) -> None:
        self.done = time.perf_counter()
        self.held = self.peak = 0

    def work(self, seconds: float) -> None:
        """Have it work on something when it has done what it was given before."""
        self.done = max(self.done, time.perf_counter()) + seconds

    def synchronize(self, _: Any = None) -> None:
        """Wait until it has done everything."""
        time.sleep(max(0.0, self.done - time.perf_counter()))

    def max_memory_allocated(self, _: Any) -> int:
        """The most that was held since `reset_peak_memory_stats`."""
        return self.peak

    def reset_peak_memory_stats(self, _: Any) -> None:
        """Count from what is held now."""
        self.peak = self.held

    def Event(self, enable_timing: bool) -> SlowEvent:
        """A mark between two works."""
        return SlowEvent(self)


class SlowEvent:
    """When a device gets to it."""

    def __init__(self, device: SlowDevice) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        """Put it behind what the device was given."""
        self.at = max(self.device.done, time.perf_counter())

    def synchronize(self) -> None:
        """Wait until the device got to it."""
        self.device.synchronize()

    def elapsed_time(self, end: SlowEvent) -> float:
        """Milliseconds."""
        return 1e3 * (end.at - self.at)
