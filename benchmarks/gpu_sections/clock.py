"""Time of the device and of the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def milliseconds(run: Callable[[], object], device: str, repetitions: int = 4) -> float:
    """The best of some runs, by the device's clock where it has one, after one to warm up."""
    run()
    return min(_once(run, device) for _ in range(repetitions))


def host_milliseconds(run: Callable[[], object], device: str, repetitions: int = 4) -> float:
    """The best time in which the host has handed everything to the device; on the CPU all of the work."""
    run()
    times = []
    for _ in range(repetitions):
        if device != "cpu":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def _once(run: Callable[[], object], device: str) -> float:
    if device == "cpu":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
