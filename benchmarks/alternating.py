"""Variants of one computation on ranks, checked and timed in alternation."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil
import torch.distributed as dist
from support.ranks import of_all, worst
from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
QUIET, PATIENCE = 0.05, 4  # cores that other processes may use in a round; rounds per round wanted
CLOCK_SECONDS = 0.02  # two ticks of the kernel's account of the machine


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, as allocators of accelerators do.

    By default glibc hands large buffers back, and the kernel clears their pages anew at every use. That costs one process, whose
    buffers are largest, a tenth of its time, so scaling would look better than it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def check(name: str, out: Tensor | None, expected: Tensor, tolerance: float, scale: float = 1.0) -> float:
    """Return the largest difference of what any rank has; None has none.

    Raises:
        RuntimeError: it is above the tolerance.
    """
    difference = worst(0.0 if out is None else (out - expected).abs().max() / scale)
    if not difference <= tolerance:
        raise RuntimeError(f"{name}: differs from one process by {difference:.1e}")
    return difference


@dataclass(frozen=True)
class Times:
    """Seconds of every repetition of one variant, each the slowest rank's, and the cores that other processes used meanwhile."""

    seconds: tuple[float, ...]
    others: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def over(self, other: Times) -> tuple[float, float, float]:
        """How many times as long this takes as `other`: ratio of the medians, and the quartiles of the ratios within one round."""
        low, _, high = statistics.quantiles((a / b for a, b in zip(self.seconds, other.seconds, strict=True)), n=4)
        return self.median / other.median, low, high


def alternate(variants: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, Times]:
    """Time variants in turn: all of them in every round, in the opposite order every second round.

    So each variant meets the same load and neighbours as its rivals. Ranks start together, and the slowest counts. A round in
    which other processes were busy is repeated, at most `PATIENCE` rounds for every one wanted; then the least disturbed count.
    Call each variant once before: the first call makes buffers and connections.
    """
    rounds: list[tuple[float, dict[str, float]]] = []
    names = list(variants)
    while len(rounds) < PATIENCE * repetitions and sum(others <= QUIET for others, _ in rounds) < repetitions:
        seconds = {}
        wall, machine, own = time.perf_counter(), _busy(), time.process_time()
        for name in names:
            dist.barrier()
            began = time.perf_counter()
            result = variants[name]()
            elapsed = time.perf_counter() - began
            del result  # or the next variant would find less memory in the allocator than this one
            seconds[name] = worst(elapsed)
        passed, busy, worked = time.perf_counter() - wall, _busy() - machine, time.process_time() - own
        seen = of_all((passed, busy, worked))
        passed, busy, _ = seen[0]  # what rank 0 sees
        # Small differences of the clocks count as nothing.
        others = max(0.0, busy - sum(worked for _, _, worked in seen) - CLOCK_SECONDS) / passed
        rounds.append((others, seconds))
        names.reverse()
    rounds = sorted(rounds, key=lambda item: item[0])[:repetitions]
    mean = statistics.mean(others for others, _ in rounds)
    return {name: Times(tuple(seconds[name] for _, seconds in rounds), mean) for name in variants}


def _busy() -> float:
    """Seconds for which the cores of this machine were busy, with its host included."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + getattr(times, "steal", 0.0)
