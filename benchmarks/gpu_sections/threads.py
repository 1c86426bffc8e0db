"""Ranks as threads of one process, each on a stream of its own: what they send is copied on a third stream, late and at random.

NCCL copies on streams of its own as well. Where attention used a tensor before it arrived, or wrote one that is still on its way,
the result would be another one. No collective waits for the device from the host.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from support.package import load_package
from torch import Tensor

load_package()

from cp_runtime.engine.collectives import CommStats, Pending, RankGroup
from cp_runtime.engine.mesh import SequenceAxes, SequenceMesh

TIMEOUT = 30.0  # seconds that a thread waits for another one
DELAY_CYCLES = 2_000_000  # of the device, about a millisecond; at most this much before every copy
DELAY_SECONDS = 0.002  # the same on the CPU


class Parcel:
    """A tensor under way, and what its sender's stream had done when it was sent."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.sent = tensor, _recorded(tensor)
        self.copied: Future[Any] = Future()


class Room:
    """Where the threads leave what they send: a queue per group, sender and receiver."""

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[Any, ...], queue.SimpleQueue[Parcel]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()

    def queue(self, *key: Any) -> queue.SimpleQueue[Parcel]:
        """The queue for a key, the same one for every thread."""
        with self._lock:
            return self._queues[key]


class Carrier:
    """Copies what arrives for one rank, in a thread and on a stream of its own.

    Args:
        seed: of the delays.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._random = random.Random(seed)
        self._thread = ThreadPoolExecutor(1)

    def fetch(self, source: queue.SimpleQueue[Parcel], target: Tensor) -> Future[Any]:
        """Receive into `target`; the result is the event behind the copy."""
        return self._thread.submit(self._copy, source, target, _recorded(target))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _copy(self, source: queue.SimpleQueue[Parcel], target: Tensor, posted: Any) -> Any:
        parcel = source.get(timeout=TIMEOUT)
        copied = None
        with torch.inference_mode():
            if self.stream is None:
                time.sleep(DELAY_SECONDS * self._random.random())
                target.copy_(parcel.tensor)
            else:
                with torch.cuda.stream(self.stream):
                    for event in (posted, parcel.sent):
                        self.stream.wait_event(event)
                    torch.cuda._sleep(self._random.randrange(DELAY_CYCLES))
                    target.copy_(parcel.tensor, non_blocking=True)
                    copied = self.stream.record_event()
        parcel.copied.set_result(copied)
        return copied


class ThreadPending(Pending):
    """Messages under way between threads, and what they hold until they have been waited for, as NCCL's do.

    Args:
        held: what was sent.
    """

    def __init__(self, stats: CommStats, futures: Sequence[Future[Any]], held: Sequence[Sequence[Tensor]]) -> None:
        self._stats, self._futures, self._held = stats, futures, held

    def wait(self) -> None:
        """Let this thread's stream wait until everything was sent and received."""
        for future in self._futures:
            event = future.result(TIMEOUT)
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
        self._held = ()
        self._stats.pending -= 1


class ThreadGroup(RankGroup):
    """The threads of one axis.

    Args:
        ranks: of the world, ascending.
        rank: of this thread.
        use: what it sends waits for nothing that a group of the same ranks sends for another use.
    """

    def __init__(
        self, room: Room, carrier: Carrier, ranks: Sequence[int], rank: int, stats: CommStats, use: str = "tokens"
    ) -> None:
        self.group, self.stats, self.via_host = None, stats, False
        self.size, self.rank = len(ranks), ranks.index(rank)
        self._global_ranks = list(ranks)
        self._room, self._carrier, self._name = room, carrier, (use, *ranks)

    @property
    def may_overlap(self) -> bool:
        """See `RankGroup.may_overlap`: copies never wait for each other."""
        return True

    def all_to_all(
        self, send: Tensor, sent: Sequence[int], received: Tensor, arriving: Sequence[int], kind: str = "all_to_all"
    ) -> Pending:
        """See `RankGroup.all_to_all`."""
        sends, receives = send.view(-1).split(list(sent)), received.view(-1).split(list(arriving))
        return self._swap(kind, [[part] for part in sends], [[part] for part in receives])

    def all_gather(self, locals_: Sequence[Tensor], lengths: Sequence[int], dim: int) -> list[Tensor]:
        """See `RankGroup.all_gather`."""
        own = [tensor.movedim(dim, 0).contiguous() for tensor in locals_]
        whole = [tensor.new_empty((sum(lengths), *tensor.shape[1:])) for tensor in own]
        shards = zip(*(tensor.split(list(lengths)) for tensor in whole), strict=True)
        self._swap("all_gather", [own] * self.size, list(shards)).wait()
        return [tensor.movedim(0, dim) for tensor in whole]

    def gather_parts(self, part: Tensor, whole: Tensor) -> Pending:
        """See `RankGroup.gather_parts`."""
        return self._swap("weights", [[part]] * self.size, [[shard] for shard in whole.chunk(self.size)])

    def largest(self, value: Tensor) -> Tensor:
        """See `RankGroup.largest`."""
        return self.all_gather([value[None]], [1] * self.size, 0)[0].amax(0)

    def _swap(self, kind: str, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]) -> Pending:
        """Send tensors to every rank, this one included, and receive some from every rank."""
        futures: list[Future[Any]] = []
        for to, tensors in enumerate(sends):
            for tensor in filter(Tensor.numel, tensors):
                parcel = Parcel(tensor)
                self._room.queue(self._name, self.rank, to).put(parcel)
                futures.append(parcel.copied)
        for source, tensors in enumerate(receives):
            for tensor in filter(Tensor.numel, tensors):
                futures.append(self._carrier.fetch(self._room.queue(self._name, source, self.rank), tensor))
        self.stats.started(kind, sum(tensor.nbytes for to, tensors in enumerate(sends) if to != self.rank for tensor in tensors))
        return ThreadPending(self.stats, futures, sends)


class ThreadMesh(SequenceMesh):
    """All threads, of which this one is `rank`. Weights have a carrier of their own, as they have a communicator."""

    def __init__(self, room: Room, device: torch.device, world: int, rank: int) -> None:
        super().__init__(None)
        self.carriers = Carrier(device, rank), Carrier(device, world + rank)
        self._room, self._carrier, self._world = room, self.carriers[0], world
        self.whole = self._group(range(world), rank)
        self.weights = ThreadGroup(room, self.carriers[1], list(range(world)), rank, self.stats, "weights")

    def _group(self, ranks: Sequence[int], rank: int) -> RankGroup:
        return ThreadGroup(self._room, self._carrier, list(ranks), rank, self.stats)

    def _make(self, ring: int, ulysses: int) -> SequenceAxes:
        rank, ranks = self.rank, range(self._world)
        row, column = rank // ulysses * ulysses, rank % ulysses
        return SequenceAxes(ring=self._group(ranks[column::ulysses], rank), ulysses=self._group(ranks[row : row + ulysses], rank))


def _recorded(tensor: Tensor) -> Any:
    """An event on this thread's stream; None on the CPU."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.device.type == "cuda" else None
