"""Collectives with exact sizes among some ranks, and their statistics."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat import start_all_to_all
from ...system import system
from ...system.environment import library_setting
from ..exchange.exchange import Exchange, Parts, exchange_of
from .profiling import trace_range

TIMED_FIRST, TIMED_EVERY = 16, 16  # waits that devices time: these, and then every how many-th, which stands for as many
KEPT_EVENTS = 1024  # pairs of device events; beyond that the older half is added up, which waits for the device


def wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def native_backend(device_type: str) -> str:
    """Return torch's backend for messages between devices of a type: nccl, xccl, hccl; gloo for CPUs, and where torch or the system
    has none."""
    return dist.Backend.default_device_backend_map.get(device_type, "gloo") if system.HAS_DEVICE_BACKENDS else "gloo"


class CommStats:
    """Statistics of one rank: bytes sent, collectives of each kind, seconds spent waiting for them, and collectives in flight.

    Time is measured by the device's clock if it has one, of a sample: events cost the host as much as an exchange. Overlap with
    computation is not counted.
    """

    def __init__(self) -> None:
        self._spare: defaultdict[torch.device, list[Any]] = defaultdict(list)  # pairs of events, which take longer to make
        self.reset()

    def reset(self) -> None:
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.pending = 0
        self._seconds, self._waits = 0.0, 0
        self._events: list[tuple[Any, Any, torch.device, int]] = []  # and the waits that each pair stands for

    @property
    def collectives(self) -> int:
        """Number of collectives of every kind; an exchange with two neighbours counts as one."""
        return self.counts.total()

    @property
    def bytes_sent(self) -> int:
        return self.bytes.total()

    @property
    def seconds(self) -> float:
        """Seconds spent waiting for collectives. Reading it waits for the last one."""
        if self._events:
            self._events[-1][1].synchronize()
        self._add_up(len(self._events))
        return self._seconds

    def started(self, kind: str, sent: int) -> None:
        self.counts[kind] += 1
        self.bytes[kind] += sent
        self.pending += 1

    def wait(self, works: Sequence[Any], device: torch.device, on_host: bool) -> None:
        """Wait for the works of one collective, and add up the time. `on_host`: by the host's clock."""
        if on_host:
            began = time.perf_counter()
            for work in works:
                work.wait()
            self._seconds += time.perf_counter() - began
        elif self._is_untimed():
            for work in works:
                work.wait()
        else:
            spare = self._spare[device]
            start, end = spare.pop() if spare else [torch.get_device_module(device).Event(enable_timing=True) for _ in range(2)]
            start.record()
            for work in works:
                work.wait()
            end.record()
            self._events.append((start, end, device, 1 if self._waits <= TIMED_FIRST else TIMED_EVERY))
            if len(self._events) > KEPT_EVENTS:
                self._events[KEPT_EVENTS // 2][1].synchronize()
                self._add_up(KEPT_EVENTS // 2)
        self.pending -= 1  # not after an error: it is still under way

    def _is_untimed(self) -> bool:
        """Count a wait; return whether it is none of the sample."""
        self._waits += 1
        return self._waits > TIMED_FIRST and self._waits % TIMED_EVERY != 0

    def _add_up(self, count: int) -> None:
        for start, end, device, waits in self._events[:count]:
            self._seconds += waits * float(start.elapsed_time(end)) / 1e3
            self._spare[device].append((start, end))
        del self._events[:count]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of a contiguous tensor's bytes."""
    flat = tensor if tensor.ndim == 1 else tensor.view(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


class Pending:
    """Messages in flight. Before `wait`, the sent data must not change, and the received data is not valid."""

    def __init__(
        self, group: RankGroup, kind: str, works: Sequence[Any], sent: int, like: Tensor, staged: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self._group, self._kind, self._works, self._device, self._staged = group, kind, works, like.device, staged
        self._on_host = group.via_host or like.is_cpu
        group.stats.started(kind, sent)

    def wait(self) -> None:
        with trace_range("cp.wait", self._kind):
            self._group.stats.wait(self._works, self._device, self._on_host)
            self._works = ()  # they keep the sent data alive
            for target, host in self._staged:
                target.copy_(host)


class PendingParts(Pending):
    """Parts of all ranks in flight, to be read where they arrive. See `RankGroup.all_to_all_in_place`."""

    def __init__(self, group: RankGroup, kind: str, parts: Parts, sent: int, like: Tensor) -> None:
        super().__init__(group, kind, (parts,), sent, like, ())
        self._parts = parts

    def read(self) -> list[Tensor]:
        """Wait, and return the parts that are not empty, flat and in rank order, until `release`."""
        self.wait()
        return self._parts.read()

    def release(self) -> None:
        self._parts.release()


class RankGroup:
    """Ranks along one axis of the mesh.

    Every collective moves exact sizes that each rank derives by itself: no collective carries a size, and uneven ones need no
    padding. On NCCL each is one kernel. Data travels as bytes, because not every backend supports every dtype.

    Args:
        group: process group, or None for a single process.
        stats: where collectives are counted.
    """

    def __init__(self, group: dist.ProcessGroup | None, stats: CommStats | None = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self._global_ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        self.stats = stats or CommStats()
        # gloo moves host memory only: accelerator tensors are staged through the host.
        self.backend = "" if group is None else dist.get_backend(group)
        self.via_host = self.backend == "gloo"

    @cached_property
    def shared(self) -> Exchange | None:
        """The exchange through shared memory, where all ranks of the group are on one computer; else None. All of them must ask
        alike: the first time, they connect."""
        return exchange_of(self.group) if self.via_host and self.group is not None and self.size > 1 else None

    @property
    def device(self) -> torch.device:
        """Device for tensors of a collective: only gloo takes them on the host."""
        accelerator = None if self.group is None or self.via_host else torch.accelerator.current_accelerator()
        return accelerator or torch.device("cpu")

    @property
    def may_overlap(self) -> bool:
        """Whether messages on this group may be in flight together with those of another group of the same ranks.

        Devices may start NCCL's kernels of two groups in different orders, and deadlock. NCCL 2.26 and newer keep the order of the
        program if the environment says so.
        """
        if self.size == 1 or self.via_host:
            return True
        ordered = self.backend == "nccl" and library_setting("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"
        return ordered and torch.cuda.nccl.version() >= (2, 26)

    def all_to_all(
        self, send: Tensor, sent: Sequence[int], received: Tensor, arriving: Sequence[int], kind: str = "all_to_all"
    ) -> Pending:
        """Send a part of `send` to every rank and receive a part of `received` from every rank, this one included.

        Args:
            send, received: contiguous, of one dtype and on one device.
            sent, arriving: elements for and from every rank, in the order of the ranks. Both sides know them.
            kind: name in statistics and traces.
        """
        staged: list[tuple[Tensor, Tensor]] = []
        if (size := send.element_size()) > 1:
            sent, arriving = [count * size for count in sent], [count * size for count in arriving]
        with trace_range("cp." + kind):
            if self.via_host:
                target, source = as_bytes(self._landing(received, staged)), as_bytes(self._leaving(send))
                works = self._by_pairs(target.split(arriving), source.split(sent))
            else:
                works = [start_all_to_all(as_bytes(received), as_bytes(send), arriving, sent, self.group)]
        return Pending(self, kind, works, send.nbytes - sent[self.rank], send, staged)

    def exchange_equally(self, received: Tensor, send: Tensor, sizes: list[int]) -> None:
        """Send equal parts to all ranks and receive as many, on the device, and have what follows wait for them.

        Args:
            received, send: flat bytes.
            sizes: bytes for and from every rank.
        """
        with trace_range("cp.all_to_all"):
            work = start_all_to_all(received, send, sizes, sizes, self.group)
            self.stats.started("all_to_all", send.numel() - sizes[0])
            self.stats.wait((work,), send.device, on_host=send.is_cpu)

    def all_to_all_in_place(
        self, shared: Exchange, send: Tensor, sent: Sequence[int], arriving: Sequence[int], kind: str = "all_to_all"
    ) -> PendingParts:
        """Send a part of memory to every rank, and receive a part from every rank, to be read where it lies.

        Args:
            shared: that of this group.
            send: memory of its `space`.
            sent, arriving: bytes for and from every rank, this one included.
            kind: see `all_to_all`.
        """
        with trace_range("cp." + kind):
            parts = shared.parts(send, sent, arriving)
        return PendingParts(self, kind, parts, send.nbytes - sent[self.rank], send)

    def pass_around(self, shared: Exchange, made: Tensor, arriving: Sequence[int]) -> Iterator[Tensor]:
        """Send memory to all ranks; return this rank's, then that of the previous one, and so on. Each is flat, read where it
        lies, and there until the next one is asked for. It counts as `size - 1` exchanges, each of the bytes of `made`.

        Args:
            shared: that of this group.
            made: memory of its `space`, which now holds what this rank sends.
            arriving: bytes from every rank, this one included.
        """
        with trace_range("cp.exchange"):
            arrivals = shared.to_all(made, arriving)
        try:
            for step in range(self.size):
                if step + 1 < self.size:
                    self.stats.started("exchange", made.nbytes)
                if not step:
                    yield made
                elif (arrival := arrivals[self.rank - step]) is None:
                    yield made[:0]
                else:
                    yield arrival.borrow(made.dtype)
                    arrival.release()
                if step + 1 < self.size:
                    coming = arrivals[self.rank - step - 1]
                    with trace_range("cp.wait", "exchange"):
                        self.stats.wait([] if coming is None else [coming], made.device, on_host=True)
        finally:  # an attention may have failed in the middle: what nobody reads counts as read
            for left in arrivals:
                if left is not None:
                    left.release()

    def exchange(self, send: Tensor, received: Tensor) -> Pending:
        """Send a tensor to the next rank, and receive one from the previous rank into `received`."""
        sent, arriving = [0] * self.size, [0] * self.size
        sent[(self.rank + 1) % self.size], arriving[self.rank - 1] = send.numel(), received.numel()
        return self.all_to_all(send, sent, received, arriving, "exchange")

    def send(self, value: Tensor, to: int) -> Pending:
        """Send a contiguous tensor to another rank, which receives from this one in the same order."""
        with trace_range("cp.send"):
            works = self._messages((), [(to, self._leaving(value))])
        return Pending(self, "send", works, value.nbytes, value, ())

    def receive(self, target: Tensor, source: int) -> Pending:
        """Receive a tensor from another rank into a contiguous tensor."""
        staged: list[tuple[Tensor, Tensor]] = []
        with trace_range("cp.receive"):
            works = self._messages([(source, self._landing(target, staged))], ())
        return Pending(self, "receive", works, 0, target, staged)

    def to_first(self, own: Tensor, counts: Sequence[int], kind: str) -> list[Tensor]:
        """Send a tensor to the first rank, which returns those of all ranks, flat and in rank order; other ranks return none.

        `counts`: elements of every rank's tensor. `kind`: see `all_to_all`.
        """
        arriving = list(counts) if self.rank == 0 else [0] * self.size
        received = own.new_empty(sum(arriving))
        self.all_to_all(own.reshape(-1), [own.numel()] + [0] * (self.size - 1), received, arriving, kind).wait()
        return list(received.split(arriving)) if self.rank == 0 else []

    def all_gather(self, locals_: Sequence[Tensor], lengths: Sequence[int], dim: int) -> list[Tensor]:
        """Concatenate the shards of all ranks along `dim`, for several tensors at once; `lengths[r]` is rank r's size along it.

        One batch of messages between pairs of ranks, as torch's own gathers need equal shards, or copy the whole.
        """
        if self.size == 1:
            return list(locals_)
        moved = [tensor.movedim(dim, 0) for tensor in locals_]
        whole = [tensor.new_empty((sum(lengths), *tensor.shape[1:])) for tensor in moved]
        shards = list(zip(*(tensor.split(list(lengths)) for tensor in whole), strict=True))
        for own, tensor in zip(shards[self.rank], moved, strict=True):
            own.copy_(tensor)
        staged: list[tuple[Tensor, Tensor]] = []
        with trace_range("cp.all_gather"):
            steps, sends = range(1, self.size), [self._leaving(own) for own in shards[self.rank] if own.numel()]
            sources = [
                ((self.rank - step) % self.size, shard) for step in steps for shard in shards[(self.rank - step) % self.size]
            ]
            arriving = [(source, self._landing(shard, staged)) for source, shard in sources if shard.numel()]
            works = self._messages(arriving, [((self.rank + step) % self.size, own) for step in steps for own in sends])
        sent = sum(own.nbytes for own in shards[self.rank]) * (self.size - 1)
        Pending(self, "all_gather", works, sent, whole[0], staged).wait()
        return [tensor.movedim(0, dim) for tensor in whole]

    def gather_parts(self, part: Tensor, whole: Tensor, kind: str = "weights") -> Pending:
        """Gather equally long parts of all ranks, in rank order, into `whole` of `size * part.numel()` elements.

        `kind`: name in statistics and traces.
        """
        works: list[Any] = []
        staged: list[tuple[Tensor, Tensor]] = []
        with trace_range("cp." + kind):
            if self.size == 1:
                whole.copy_(part)
                if whole.device.type != "cpu":  # no collective to wait for, and the waiter may use another stream
                    works.append(torch.get_device_module(whole.device).current_stream(whole.device).record_event())
            else:
                target, source = as_bytes(self._landing(whole, staged)), as_bytes(self._leaving(part))
                if self.via_host:
                    works = self._by_pairs(target.split(part.nbytes), [source] * self.size)
                else:
                    works.append(dist.all_gather_into_tensor(target, source, group=self.group, async_op=True))
        return Pending(self, kind, works, part.nbytes * (self.size - 1), whole, staged)

    def largest(self, value: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks. `value` is contiguous, and may be overwritten."""
        if self.size == 1:
            return value
        with trace_range("cp.all_reduce"):
            shared = value.cpu() if self.via_host else value
            work = dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group, async_op=True)
        Pending(self, "all_reduce", [work], value.nbytes, value, ()).wait()
        return shared.to(value.device)

    def _by_pairs(self, arriving: Sequence[Tensor], leaving: Sequence[Tensor]) -> list[Any]:
        """Start receiving a tensor from every rank and sending one to every rank. Empty ones are left out."""
        arriving[self.rank].copy_(leaving[self.rank])
        # By distance: as each rank sends to the next one, it receives from the previous one, and no rank is everybody's target.
        around = [(self.rank + step) % self.size for step in range(1, self.size)]
        sources = [(rank, arriving[rank]) for rank in reversed(around) if arriving[rank].numel()]
        return self._messages(sources, [(rank, leaving[rank]) for rank in around if leaving[rank].numel()])

    def _messages(self, arriving: Sequence[tuple[int, Tensor]], leaving: Sequence[tuple[int, Tensor]]) -> list[Any]:
        """Start receiving tensors from ranks, and sending others to ranks.

        gloo requests a message in the byte stream in which it sends. After the start of a long send, as in its own alltoall and
        allgather, the request waits for all of that, and a link carries one direction after the other.
        """
        if self.shared is not None:
            received = [(rank % self.size, as_bytes(tensor)) for rank, tensor in arriving]
            return [self.shared.messages(received, [(rank % self.size, as_bytes(tensor)) for rank, tensor in leaving])]
        if len(arriving) + len(leaving) == 1:
            start, pairs = (dist.irecv, arriving) if arriving else (dist.isend, leaving)
            return [start(as_bytes(tensor), self.global_rank(rank), self.group) for rank, tensor in pairs]
        operations = [dist.P2POp(dist.irecv, as_bytes(tensor), self.global_rank(rank), self.group) for rank, tensor in arriving]
        operations += [dist.P2POp(dist.isend, as_bytes(tensor), self.global_rank(rank), self.group) for rank, tensor in leaving]
        return dist.batch_isend_irecv(operations) if operations else []

    def _leaving(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the backend sends in place of this one."""
        return tensor.cpu() if self.via_host and self.shared is None else tensor

    def _landing(self, tensor: Tensor, staged: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the buffer that the backend receives into; append it to `staged` if it must be copied to `tensor` afterwards."""
        if not self.via_host or tensor.device.type == "cpu" or self.shared is not None:
            return tensor
        host = torch.empty_like(tensor, device="cpu")
        staged.append((tensor, host))
        return host

    def global_rank(self, rank: int) -> int:
        """Return the global number of a rank of this group, modulo its size, for torch's point-to-point functions."""
        return self._global_ranks[rank % self.size]
