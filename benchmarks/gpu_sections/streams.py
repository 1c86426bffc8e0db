"""Every mode with ranks that are threads, each on a stream of its own, and whether attention waits for the device.

What they send is copied on a third stream, late and at random, as NCCL copies on streams of its own: where attention used a tensor
before it arrived, or wrote one that is still on its way, the result would be another one. A wait of the host inside attention costs
time in every block; torch raises where it would happen. Then blocks whose weights are shared out, on the device or on the host:
what is fetched beside attention arrives late, and buffers are used in turns.
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cp_runtime.engine.attention.context_parallel import context_parallel_attention
from cp_runtime.engine.ranks.collectives import CommStats, Pending, RankGroup
from cp_runtime.engine.ranks.config import ContextParallelConfig, SequenceSettings
from cp_runtime.engine.ranks.mesh import SequenceAxes, SequenceMesh
from cp_runtime.engine.ranks.sharding import JointLayout
from cp_runtime.engine.weights import sharded

from .section import Section

MODES = {
    "Ulysses": (1, 0, "allgather", 1),
    "Ulysses in rounds": (1, 0, "allgather", 3),
    "ring alltoall": (0, 1, "alltoall", 1),
    "ring allgather": (0, 1, "allgather", 1),
    "unified alltoall": (2, 2, "alltoall", 1),
}
"""Ring and Ulysses degree, 0 being the number of ranks; method, and rounds of Ulysses."""
HEADS, HEAD_DIM, BLOCKS = 6, 128, 4
BOUND = 2e-5  # of attention
BLOCKS_BOUND = 1e-4  # of all blocks: their matrix products are of other lengths
WORLDS = (2, 3, 4)
PIECE = 1 << 20  # bytes; several to a block
TIMEOUT = 30.0  # seconds that a thread waits for another one
DELAY_CYCLES = 2_000_000  # of the device, about a millisecond; at most this much before every copy

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def streams(section: Section) -> None:
    """A result per number of ranks and mode, one more on waits of the host, and one per place of the weights."""
    lengths = (5, 96) if section.rehearse else (77, 1024)
    rounds = 2 if section.rehearse or section.few else 10
    for world in WORLDS[:1] if section.few else WORLDS:
        for mode, (ring, ulysses, method, parts) in MODES.items():
            if (ring or world) * (ulysses or world) != world:
                continue
            name = f"{world} threads, {mode}"
            config = SequenceSettings(rotate_method=method).with_degrees(ring or world, ulysses or world, parts)
            with section.part(name), Ranks(world, lengths, config, section.device) as ranks:
                largest = max(ranks.attend() for _ in range(rounds))
                section.check(name, largest <= BOUND, rounds=rounds, largest=largest)
                with section.part(f"{name}, no wait of the host"), _no_waits():
                    ranks.attend(compare=False)
                    section.add(f"{name}, no wait of the host")
        for place in ("device",) if section.few else ("device", "host"):
            name = f"{world} threads, weights shared out on the {place}"
            config = SequenceSettings().with_degrees(1, world)
            with section.part(name), Ranks(world, lengths, config, section.device) as ranks:
                largest = ranks.run_blocks(rounds, on_host=place == "host")
                section.check(name, largest <= BLOCKS_BOUND, rounds=rounds, largest=largest)


class Meeting:
    """Where the threads of a group wait for each other and see what each of them brings."""

    def __init__(self, size: int) -> None:
        self._barrier, self._brought = threading.Barrier(size, timeout=TIMEOUT), [None] * size

    def meet(self, rank: int, brings: Any) -> list[Any]:
        """Return what all threads bring, by rank."""
        self._brought[rank] = brings
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        return found


@dataclass(frozen=True)
class Copies:
    """Copies under way: events behind those of all threads, and what is sent, held until somebody waits, as NCCL's work does."""

    copied: Sequence[torch.cuda.Event]
    held: object

    def wait(self) -> None:
        """Let this thread's stream wait until everything was sent and received."""
        for event in self.copied:
            torch.cuda.current_stream().wait_event(event)


class ThreadGroup(RankGroup):
    """The threads of one axis. Copies never wait for each other, so messages of two groups may overlap.

    Args:
        meeting: the same for all threads of the group.
        ranks: of the world, ascending.
        rank: of this thread.
        stream: that its copies run on.
    """

    may_overlap = True

    def __init__(self, meeting: Meeting, ranks: Sequence[int], rank: int, stats: CommStats, stream: torch.cuda.Stream) -> None:
        self.group, self.stats, self.via_host = None, stats, False
        self.size, self.rank = len(ranks), ranks.index(rank)
        self._global_ranks = list(ranks)
        self._meeting, self._stream, self._random = meeting, stream, random.Random(rank)

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
        everybody = self._meeting.meet(self.rank, (sends, torch.cuda.current_stream().record_event()))
        with torch.cuda.stream(self._stream):
            for _, ready in everybody:
                self._stream.wait_event(ready)
            for (theirs, _), targets in zip(everybody, receives, strict=True):
                torch.cuda._sleep(self._random.randrange(DELAY_CYCLES))
                for source, target in zip(theirs[self.rank], targets, strict=True):
                    target.copy_(source, non_blocking=True)
            copied = self._stream.record_event()
        sent = sum(tensor.nbytes for to, tensors in enumerate(sends) if to != self.rank for tensor in tensors)
        return Pending(self, kind, [Copies(self._meeting.meet(self.rank, copied), sends)], sent, sends[0][0], ())


class ThreadMesh(SequenceMesh):
    """All threads, of which this one is `rank`. Weights have a stream of their own, as they have a communicator.

    Args:
        meetings: of all groups, by use and ranks; shared by the threads.
    """

    def __init__(self, meetings: dict[Any, Meeting], device: torch.device, world: int, rank: int) -> None:
        super().__init__(None)
        self._meetings, self._world, self._device = meetings, world, device
        self._streams: dict[str, torch.cuda.Stream] = {}
        self.whole, self.weights = (self._group(range(world), rank, use) for use in ("tokens", "weights"))

    def _group(self, ranks: range, rank: int, use: str = "tokens") -> RankGroup:
        meeting = self._meetings.setdefault((use, ranks), Meeting(len(ranks)))
        if use not in self._streams:
            self._streams[use] = torch.cuda.Stream(self._device)
        return ThreadGroup(meeting, ranks, rank, self.stats, self._streams[use])

    def _make(self, ring: int, ulysses: int) -> SequenceAxes:
        rank, ranks = self.rank, range(self._world)
        row, column = rank // ulysses * ulysses, rank % ulysses
        return SequenceAxes(ring=self._group(ranks[column::ulysses], rank), ulysses=self._group(ranks[row : row + ulysses], rank))


class Ranks:
    """Threads that share a sequence, to be used in a with statement."""

    def __init__(self, world: int, lengths: tuple[int, ...], config: ContextParallelConfig, device: str) -> None:
        self._device, self._config, self._layout = torch.device(device), config, JointLayout(lengths, world)
        meetings: dict[Any, Meeting] = {}
        self._meshes = [ThreadMesh(meetings, self._device, world, rank) for rank in range(world)]
        self._streams = [torch.cuda.Stream(self._device) for _ in range(world)]
        self._threads = ThreadPoolExecutor(world)
        self._whole = [torch.randn(1, sum(lengths), HEADS, HEAD_DIM, device=self._device) for _ in range(3)]

    def __enter__(self) -> Ranks:
        torch.cuda.synchronize()
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def attend(self, compare: bool = True) -> float:
        """The largest difference to one process; 0 without looking."""

        def attend(rank: int) -> Tensor:
            return self._attention(rank)(*(self._layout.take_local(tensor, rank, 1) for tensor in self._whole))

        outs = self._on_all(attend)
        return self._difference(outs, _attention(*self._whole)) if compare else 0.0

    def run_blocks(self, rounds: int, on_host: bool) -> float:
        """The same of calls of a model whose blocks' weights are shared out."""
        model = nn.ModuleList(Block() for _ in range(BLOCKS)).to(self._device)
        x = self._whole[0].flatten(2)
        with torch.inference_mode():
            expected = x
            for block in model:
                expected = block(expected, _attention)

        def share_out(rank: int) -> tuple[nn.ModuleList, sharded.ShardedWeights]:
            own = copy.deepcopy(model)
            weights = sharded.ShardedWeights(own, self._meshes[rank].weights, self._device, on_host=on_host)
            for name in weights.blocks:
                weights.keep(name)
            return own, weights

        def call(rank: int) -> Tensor:
            (blocks, weights), out = models[rank], self._layout.take_local(x, rank, 1)

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                attended = self._attention(rank)(q, k, v)
                weights.after_attention()
                return attended

            with weights.call():
                for block in blocks:
                    out = block(out, attend)
            return out

        usual, sharded.SMALLEST_PIECE = sharded.SMALLEST_PIECE, PIECE
        try:
            models = self._on_all(share_out)
            return max(self._difference(self._on_all(call), expected) for _ in range(rounds))
        finally:
            sharded.SMALLEST_PIECE = usual

    def _attention(self, rank: int) -> Attention:
        return lambda q, k, v: context_parallel_attention(
            q, k, v, mesh=self._meshes[rank], config=self._config, q_layout=self._layout
        )

    def _on_all(self, run: Callable[[int], Any]) -> list[Any]:
        """What it returns on every rank, each in its thread and on its stream."""

        def on_rank(rank: int) -> Any:
            with torch.inference_mode(), torch.cuda.stream(self._streams[rank]):
                return run(rank)

        return list(self._threads.map(on_rank, range(len(self._meshes))))

    def _difference(self, outs: list[Tensor], exact: Tensor) -> float:
        torch.cuda.synchronize()
        local = [self._layout.take_local(exact, rank, 1) for rank in range(len(outs))]
        return max((out - own).abs().max().item() for out, own in zip(outs, local, strict=True))


class Block(nn.Module):
    """A matrix product and an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM)

    def forward(self, x: Tensor, attend: Attention) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        return x + attend(q, k, v).flatten(2)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of one process, `[B, S, H, D]`."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@contextlib.contextmanager
def _no_waits() -> Iterator[None]:
    """Let torch raise where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
