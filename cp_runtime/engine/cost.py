"""What one context-parallel attention costs, for every way to split it, and which way to take.

The model, for P ranks as ring R x ulysses U, S queries and S_k keys in all, H query and K key/value heads of D elements of b
bytes, batch B, on a link with latency a and bandwidth w, attention at f operations per second and memory at m bytes per second:

| term | formula |
|---|---|
| bytes sent by Ulysses | `(U - 1) / U * B D b (2 S H + 2 S_k K) / P` (q, k, v and the output) |
| bytes sent by the ring | `(R - 1) * 2 S_k B D b K / P` |
| attention of one rank | `t = 4 B S S_k D h / (f R)`, h = heads of the rank with the most, `ceil(K / U) * H / K` |
| Ulysses | `2 a + bytes / w` |
| ring alltoall | `(R - 1) * max(0, a + bytes / (R - 1) / w - overlap * t / R)`: what is not hidden behind a step |
| ring allgather | `a + bytes / w` |
| merging | `(R - 1) * 4 * B S D h * 4 / (R m)`: the output is read and written in float32 for every further chunk |

The choice has the least sum of attention, communication and merging; where two are equal, the higher Ulysses degree. `a`, `w`,
`f` and `m` are measured on the ranks when they start (`measure`) and shared, so that every rank chooses alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.distributed as dist

from .attention.kernels import attend_with_lse
from .attention.ulysses import repeats
from .config import ContextParallelConfig, SequenceSettings
from .mesh import SequenceMesh, wait_for


@dataclass(frozen=True)
class Rates:
    """What the machine does.

    Args:
        latency: seconds of a collective that carries next to nothing.
        bandwidth: bytes per second that one rank sends while all do.
        flops: operations per second of attention.
        memory: bytes per second of reading and writing.
        overlap: share of a computation that communication can hide behind: 0 where ranks compute on the cores that also copy, or
            data goes through host memory.
    """

    latency: float
    bandwidth: float
    flops: float
    memory: float
    overlap: float


@dataclass(frozen=True)
class AttentionShape:
    """One attention over the whole sequence."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int


@dataclass(frozen=True)
class Cost:
    """What one attention costs one rank.

    Args:
        bytes_sent: to other ranks.
        communication: seconds spent waiting for them.
        compute: seconds of attention and merging.
    """

    bytes_sent: float
    communication: float
    compute: float

    @property
    def total(self) -> float:
        """Seconds."""
        return self.communication + self.compute


def cost(shape: AttentionShape, ring: int, ulysses: int, rotate_method: str, rates: Rates) -> Cost:
    """Evaluate the model."""
    ranks = ring * ulysses
    element = shape.batch * shape.head_dim * shape.itemsize
    kv_heads = shape.kv_heads * (repeats(shape.heads, shape.kv_heads, ulysses) if ulysses > 1 else 1)
    own_heads = math.ceil(kv_heads / ulysses) * shape.heads / kv_heads
    tokens = 2 * shape.queries * shape.heads + 2 * shape.keys * kv_heads
    heads_sent = (ulysses - 1) / ulysses * element * tokens / ranks
    keys_sent = (ring - 1) * 2 * shape.keys * element * kv_heads / ranks
    attention = 4 * shape.batch * shape.queries * shape.keys * shape.head_dim * own_heads / ring / rates.flops
    waiting = 2 * rates.latency + heads_sent / rates.bandwidth if ulysses > 1 else 0.0
    merging = 0.0
    if ring > 1 and rotate_method == "allgather":
        waiting += rates.latency + keys_sent / rates.bandwidth
    elif ring > 1:
        step = rates.latency + keys_sent / (ring - 1) / rates.bandwidth
        waiting += (ring - 1) * max(0.0, step - rates.overlap * attention / ring)
        merging = (ring - 1) * 4 * shape.batch * shape.queries * shape.head_dim * own_heads * 4 / ring / rates.memory
    return Cost(heads_sent + keys_sent, waiting, attention + merging)


def choose(shape: AttentionShape, ranks: int, settings: SequenceSettings, rates: Rates) -> tuple[int, int]:
    """(ring, ulysses) of least cost, of those that the settings allow if there are any."""
    even = shape.queries % ranks == 0 and shape.keys % ranks == 0
    allowed = [
        (ring, ulysses)
        for ring, ulysses in factors(ranks)
        if (ring == 1 or settings.ring_anything or even)
        and (ulysses == 1 or settings.ulysses_anything or (even and shape.kv_heads % ulysses == 0))
    ]
    return min(
        allowed or factors(ranks), key=lambda pair: (cost(shape, pair[0], pair[1], settings.rotate_method, rates).total, pair[0])
    )


def factors(ranks: int) -> Iterator[tuple[int, int]]:
    """Every (ring, ulysses) whose product is the number of ranks."""
    return ((ring, ranks // ring) for ring in range(1, ranks + 1) if ranks % ring == 0)


@lru_cache(maxsize=1024)
def decide(shape: AttentionShape, ranks: int, settings: SequenceSettings, rates: Rates) -> tuple[ContextParallelConfig, Cost]:
    """How an attention is shared, and what that should cost. The same arguments give the same answer on every rank."""
    given = settings.ring_degree, settings.ulysses_degree
    # Given degrees are for the ranks that a full batch axis leaves. With fewer groups the rest of it is folded in.
    chosen = given if math.prod(given) == ranks else choose(shape, ranks, settings, rates)
    return settings.with_degrees(*chosen), cost(shape, *chosen, settings.rotate_method, rates)


class DegreePlanner:
    """Decides the degrees of every attention of one call, and adds up what they should cost.

    Args:
        settings: what the user asked for.
        ranks: that share the sequence.
        rates: of the machine.
    """

    def __init__(self, settings: SequenceSettings, ranks: int, rates: Rates) -> None:
        self.settings, self.ranks, self.rates = settings, ranks, rates
        self.chosen: tuple[int, int] | None = None
        self.bytes_sent = self.seconds = 0.0
        self._decided: dict[AttentionShape, tuple[ContextParallelConfig, Cost]] = {}  # blocks mostly attend alike

    def __call__(self, shape: AttentionShape) -> ContextParallelConfig:
        decided = self._decided.get(shape)
        if decided is None:
            decided = self._decided[shape] = decide(shape, self.ranks, self.settings, self.rates)
        config, predicted = decided
        self.chosen = config.mesh_shape
        self.bytes_sent += predicted.bytes_sent
        self.seconds += predicted.communication
        return config


def measure(mesh: SequenceMesh, device: torch.device) -> Rates:
    """Measure the rates; every rank returns rank 0's. A fraction of a second, all ranks together."""
    whole, ranks = mesh.whole, mesh.size
    cpu = device.type == "cpu"
    tokens, elements = (512, 1 << 18) if cpu else (4096, 1 << 22)
    dtype = torch.float32 if cpu else torch.bfloat16

    def send(count: int) -> Callable[[], object]:
        send, received = (torch.zeros(ranks * count, dtype=dtype, device=device) for _ in range(2))
        return lambda: whole.all_to_all(send, [count] * ranks, received, [count] * ranks).wait()

    qkv = torch.randn(3, 1, 4, tokens, 64, device=device).to(dtype)
    block = torch.zeros(elements * 4, dtype=dtype, device=device)

    def delay() -> None:
        for _ in range(16):
            block.clone()

    latency = _seconds(send(1), device, delay)
    sending = max(_seconds(send(elements), device, delay) - latency, 1e-9)
    rates = Rates(
        latency=latency,
        bandwidth=elements * (ranks - 1) * dtype.itemsize / sending,
        flops=4 * 4 * tokens**2 * 64 / _seconds(lambda: attend_with_lse(*qkv), device, delay),
        memory=2 * block.nbytes / _seconds(block.clone, device, delay),
        overlap=0.0 if cpu or whole.via_host else 1.0,  # staging waits for the device
    )
    shared = torch.tensor(astuple(rates), dtype=torch.float64, device="cpu" if whole.via_host else device)
    dist.broadcast(shared, whole.global_rank(0), group=whole.group)
    mesh.stats.reset()
    return Rates(*shared.tolist())


def _seconds(run: Callable[[], object], device: torch.device, delay: Callable[[], object]) -> float:
    """The best of a few runs, after one to warm up; on the clock of the device where it has one, without what the host launches.

    Args:
        delay: keeps the device at work until the host has launched the runs.
    """
    run()
    if device.type == "cpu":
        times = []
        for _ in range(3):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return min(times)
    wait_for(device)
    marks = [torch.get_device_module(device).Event(enable_timing=True) for _ in range(4)]
    delay()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return min(float(start.elapsed_time(end)) for start, end in pairwise(marks)) / 1e3
