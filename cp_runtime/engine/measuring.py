"""Speeds of the ranks and their links, measured at start. Every rank gets the same numbers."""

from __future__ import annotations

import math
import time
import timeit
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean, median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .cost import Rates
from .ranks.collectives import RankGroup, wait_for
from .ranks.mesh import SequenceMesh
from .ranks.sharding import Shares

SAME_SPEED = 0.1  # devices of different names that differ by less count as equal
SAME_NAME = 0.15, 1.0  # those of one name get shares in between: a power limit or heat; beyond, another program was at work
MEASUREMENTS = 3  # of a device's speed: one alone may meet another program, and its shares would stay
CPU = zlib.crc32(b"cpu")  # a core of a busy machine is slow now and then
SLOWDOWN = 2.0  # times as long: the link has become slower; a late rank does not explain it
# Seconds to measure a link, and the limit while it becomes slower. A token bucket lets a burst pass at once: one of 10 MB at
# 40 Mbit/s measured 54 MB/s in 20 ms, and 2.6 MB/s in a second.
LINK_SECONDS, SLOWING_LINK_SECONDS = 0.02, 1.0
CLOCK_SECONDS = 0.3  # seconds of work that raise the clock of an idle accelerator, which may be a sixth of the one under load
SIZES = {"cpu": (256, 1 << 18, 256), "accelerator": (4096, 1 << 22, 4096)}
"""Problem sizes: tokens of an attention, elements to send, side of a matrix."""
VIDEO = 8  # times as much as an exchange of a picture: 64 MiB between two accelerators
HEAD_DIM = 128  # of nearly all of the large models: attention with 64 is slower
SHARE_STEPS = 4  # shares are multiples of this fraction of the slowest rank's


@dataclass(frozen=True)
class Measured:
    each: tuple[Rates, ...]  # of every rank. Latency and bandwidth are those while all ranks send to each other.
    devices: tuple[int, ...]  # a number for the name of every rank's device
    machines: tuple[str, ...] = ()  # of every rank; empty = all are on one
    # (latency, bandwidth) of every rank while all send within their machine only; empty where there is one machine
    inside: tuple[tuple[float, float], ...] = ()
    speeds: tuple[tuple[float, ...], ...] = ()  # of the ranks, in each of some measurements; empty = they are equally fast

    def of(self, *groups: Sequence[int]) -> Rates:
        """Return the mean over the ranks in some groups. The link is the one inside machines if each group is on one."""
        ranks = [rank for group in groups for rank in group]
        some, all_ = [self.each[rank] for rank in ranks], self.each
        links = [(one.latency, one.bandwidth) for one in all_]
        if self.inside and all(len({self.machines[rank] for rank in group}) == 1 for group in groups):
            links = [self.inside[rank] for rank in ranks]
        # A collective ends with its slowest link, and with the rank that hides least of it.
        return Rates(
            latency=max(latency for latency, _ in links),
            bandwidth=min(bandwidth for _, bandwidth in links),
            flops=fmean(one.flops for one in some),
            memory=fmean(one.memory for one in some),
            overlap=min(one.overlap for one in all_),
            linear=fmean(one.linear for one in some),
            launch=max(one.launch for one in some),
            units=max(one.units for one in some),
        )

    @property
    def shares(self) -> Shares:
        """Shares in proportion to the median speeds of the ranks; empty where the devices are about equally fast in one of the
        measurements, or CPU ranks. They are rounded, so another start gives the same ones."""
        least, most = SAME_NAME if len(set(self.devices)) == 1 else (SAME_SPEED, math.inf)
        differ = [min(each) * (1 + least) < max(each) <= min(each) * (1 + most) for each in self.speeds]
        if set(self.devices) == {CPU} or not differ or not all(differ):
            return ()
        speeds = [median(each) for each in zip(*self.speeds, strict=True)]
        return tuple(max(SHARE_STEPS, round(SHARE_STEPS * speed / min(speeds))) for speed in speeds)


def device_name(device: torch.device) -> str:
    """Return torch's name of a device, or its type."""
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if name is None else str(name(device))


def device_driver() -> str:
    """Return the versions that a device's speed depends on: torch and its driver."""
    return f"{torch.__version__}, {torch.version.cuda or torch.version.hip or ''}"


def measure(mesh: SequenceMesh, device: torch.device, name: str = "", machines: Sequence[str] = ()) -> Measured:
    """Measure this rank and its links, with all ranks, in a fraction of a second. `name`: kind of device; `machines`: of ranks."""
    whole, ranks = mesh.whole, mesh.size
    cpu, place = device.type == "cpu", torch.device("cpu") if whole.via_host else device
    tokens, elements, side = SIZES["cpu" if cpu else "accelerator"]
    dtype = torch.float32 if cpu else torch.bfloat16
    qkv = torch.randn(3, 1, 4, tokens, HEAD_DIM, device=device).to(dtype)
    matrix = torch.randn(side, side, device=device).to(dtype)
    block = torch.zeros(elements * 4, dtype=dtype, device=device)
    delay = partial(_keep_busy, block)

    began = time.perf_counter()
    while not cpu and time.perf_counter() - began < CLOCK_SECONDS:
        matrix @ matrix
        wait_for(device)

    def attend() -> object:
        return scaled_dot_product_attention(*qkv)

    def best(run: Callable[[], object]) -> float:
        return min(_times(run, device, delay))

    def sustained(run: Callable[[], object]) -> float:
        """Return the long-term seconds of a run: a link may absorb a burst at once. All ranks stop at the same time."""
        began, found = time.perf_counter(), list[float]()
        while True:
            # All ranks judge the same maxima, so all leave in the same pass: one more would wait for sends that nobody makes.
            own = torch.tensor([*_times(run, device, delay), time.perf_counter() - began], device=place)
            *times, spent = whole.largest(own).tolist()
            found += times
            seconds, slower = sustained_time(found)
            if spent >= (SLOWING_LINK_SECONDS if slower else LINK_SECONDS):
                return seconds

    def link(peers: Sequence[bool]) -> tuple[float, float]:
        latency = best(_sender(whole, peers, block[:1]))
        sending = max(sustained(_sender(whole, peers, block[:elements])) - latency, 1e-9)  # latency may be most of it
        return latency, elements * max(1, sum(peers) - 1) * dtype.itemsize / sending

    def hidden(attending: float) -> float:
        """Return the part of the shorter of an attention and a transfer that passes beside the other."""
        send = _sender(whole, [True] * ranks, block[:elements])
        sending, together = best(send), best(lambda: send(attend))
        return min(1.0, max(0.0, (attending + sending - together) / min(attending, sending)))

    began, worked = time.perf_counter(), time.process_time()
    latency, bandwidth = link([True] * ranks)
    # While a slow network sends, the core of a CPU rank is free.
    work = (time.process_time() - worked) / (time.perf_counter() - began)
    attending, multiplying = [], []
    for _ in range(MEASUREMENTS):
        whole.largest(torch.zeros(1, device=place))  # all at once: devices may share their power or their host's cores
        attending.append(best(attend))
        multiplying.append(best(lambda: matrix @ matrix))
    flops = [4 * 4 * tokens**2 * HEAD_DIM / seconds for seconds in attending]
    linear = [2 * side**3 / seconds for seconds in multiplying]
    # Of attention and matrix products by halves. Times add up, not speeds: the harmonic mean.
    speeds = [2 / (1 / one + 1 / other) for one, other in zip(flops, linear, strict=True)]
    overlap = max(0.0, 1 - work) if cpu else hidden(min(attending))
    inside = link([name == machines[whole.rank] for name in machines]) if len(set(machines)) > 1 else ()
    rates = (
        latency,
        bandwidth,
        median(flops),
        2 * block.nbytes / best(block.clone),
        overlap,
        median(linear),
        _launch(device),
        getattr(torch.cuda.get_device_properties(device), "multi_processor_count", 1) if device.type == "cuda" else 1,
    )
    first, last = 1 + MEASUREMENTS, 1 + MEASUREMENTS + len(rates)
    # One table for all ranks. The name of the device travels as its crc32, which a float64 holds exactly.
    own = [zlib.crc32(name.encode()), *speeds, *rates, *inside]
    table = whole.all_gather([torch.tensor([own], dtype=torch.float64, device=place)], [1] * ranks, 0)[0].tolist()
    mesh.stats.reset()  # no call has sent these bytes
    return Measured(
        tuple(Rates(*row[first:last]) for row in table),
        tuple(int(row[0]) for row in table),
        tuple(machines),
        tuple((row[-2], row[-1]) for row in table) if inside else (),
        tuple(zip(*(row[1:first] for row in table), strict=True)),
    )


def exchange_seconds(group: RankGroup, device: torch.device) -> float:
    """Return the seconds of exchanges among all ranks of a group, of a picture's size and of a video's: those of the slowest rank.

    Shared memory copies large messages in pieces, beside each other, and gains by that; a picture's are one piece.
    """
    picture, seconds = SIZES["cpu" if device.type == "cpu" else "accelerator"][1], 0.0
    for elements in (picture, VIDEO * picture // max(1, group.size - 1)):
        part = torch.zeros(elements, dtype=torch.bfloat16, device=device)
        seconds += min(_times(_sender(group, [True] * group.size, part), device, partial(_keep_busy, part)))
    return group.largest(torch.tensor([seconds], device=group.device)).item()


def _sender(group: RankGroup, peers: Sequence[bool], part: Tensor) -> Callable[..., object]:
    """Return a function that sends as much as `part` to each of some ranks, and receives as much from each. It takes a function to
    run meanwhile."""
    counts = [part.numel() * peer for peer in peers]
    send, received = (part.new_zeros(sum(counts)) for _ in range(2))

    def run(meanwhile: Callable[[], object] = lambda: None) -> None:
        pending = group.all_to_all(send, counts, received, counts)
        meanwhile()
        pending.wait()

    return run


def _keep_busy(block: Tensor) -> None:
    for _ in range(16):
        block.clone()


def _launch(device: torch.device) -> float:
    """Return the seconds of the host to launch an operation."""
    small, count = torch.zeros(1, device=device), 200
    times = timeit.repeat(lambda: small.add_(1), lambda: wait_for(device), number=count, repeat=3)
    wait_for(device)
    return min(times) / count


def sustained_time(times: Iterable[float]) -> tuple[float, bool]:
    """Return (the minimum since the last slowdown, whether the last time is a slowdown)."""
    best, slower = math.inf, False
    for each in times:
        slower = each > SLOWDOWN * best
        best = each if slower else min(each, best)
    return best, slower


def _times(run: Callable[[], object], device: torch.device, delay: Callable[[], object]) -> list[float]:
    """Return the seconds of a few runs, after one to warm up; by the device's clock if it has one, without the host's launches.
    `delay`: keeps the device busy until the host has launched the runs."""
    run()
    if device.type == "cpu":
        return [max(seconds, 1e-9) for seconds in timeit.repeat(run, number=1, repeat=3)]
    wait_for(device)
    marks = [torch.get_device_module(device).Event(enable_timing=True) for _ in range(4)]
    delay()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return [max(float(start.elapsed_time(end)) / 1e3, 1e-9) for start, end in pairwise(marks)]
