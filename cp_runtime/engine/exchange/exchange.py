"""Messages between ranks of one computer through memory that all of them map.

A sender copies a message into its own segment, once for all receivers, or makes it there, and goes on: only `KEPT` unread messages
make it wait. The receiver copies it out, or computes from where it lies. A long one is announced piece by piece, so that one piece
is read while the next is written. Sizes are known on both sides. Memory is used again when all receivers have read it; more is
taken only where messages are larger, or more of them under way, than before.

A single number for all ranks needs no message: it is published in the segment, and read there later.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat import timeout_of
from ...system import system
from .copies import CPU_COPIES, Copies, copies_of
from .segment import KEPT, Segment
from .signals import OtherEnded, Signals, TookTooLong

# Bytes. Each piece costs a signal and a call: 4.2 MB take 145 µs in pieces of 1 MB, and 84 in one (docs/performance.md). Larger
# messages gain by pieces: the receiver copies one while the sender copies the next.
PIECE = 8 << 20
MAX_SLACK = 2  # a message may take memory that is up to so many times as large; larger slots wait for larger messages
TIMEOUT = 1800.0  # seconds, torch's default


def pieces(nbytes: int) -> int:
    return -(-nbytes // PIECE)


class Slot:
    """Memory in this rank's segment. `readers`: ranks that have not read it yet."""

    __slots__ = ("at", "readers", "size")

    def __init__(self, at: int, size: int) -> None:
        self.at, self.size, self.readers = at, size, 0


class Arrival:
    """A message from another rank, of a known size."""

    __slots__ = ("_exchange", "at", "is_read", "missing", "nbytes", "number", "source")

    def __init__(self, exchange: Exchange, source: int, nbytes: int, number: int) -> None:
        self._exchange, self.source, self.nbytes, self.number = exchange, source, nbytes, number
        self.at, self.missing, self.is_read = 0, pieces(nbytes), False

    def borrow(self, dtype: torch.dtype) -> Tensor:
        """Return it where it lies, until `release`."""
        return self._exchange.segments[self.source].view(self.at, self.nbytes // dtype.itemsize, dtype)

    def copy_to(self, flat: Tensor, copies: Copies, after: Any) -> None:
        """Copy it into bytes, each piece as soon as it is there, and release it. A device does so after this returns, behind the
        event."""
        done, segment = after, self._exchange.segments[self.source]
        for piece, at in enumerate(range(0, self.nbytes, PIECE), 1):
            self._exchange.wait_for(self, pieces(self.nbytes) - piece)
            count = min(PIECE, self.nbytes - at)
            target = flat if count == self.nbytes else flat[at : at + count]
            source = segment.view_for(flat.device, self.at + at, count)
            done = copies.start(target, source, after)
        copies.then(done, self.release)
        copies.wait_for(done)

    def wait(self) -> None:
        """Wait until all of it is there."""
        self._exchange.wait_for(self, 0)

    def release(self) -> None:
        """Give the memory back to its sender."""
        self.is_read = True
        self._exchange.post_reads(self.source)


class Received:
    """The messages that `wait` of a collective waits for, for some tensors.

    Args:
        copies: of the tensors' device.
        after: event behind which the tensors may be written to.
        sent: event behind the copies of what is sent, which may change afterwards.
    """

    def __init__(
        self, exchange: Exchange, arrivals: Sequence[tuple[Arrival, Tensor]], copies: Copies, after: Any, sent: Any
    ) -> None:
        self._exchange, self._arrivals = exchange, arrivals
        self._copies, self._after, self._sent = copies, after, sent

    def wait(self) -> None:
        for arrival, tensor in self._arrivals:
            arrival.copy_to(tensor, self._copies, self._after)
        self._copies.wait_for(self._sent)
        self._arrivals = ()

    def release(self) -> None:
        """Return the memory of abandoned messages to their senders."""
        for arrival, _ in self._arrivals:
            arrival.release()
        self._arrivals = ()

    def __del__(self) -> None:
        if self._arrivals:
            self._exchange.abandoned.append(self.release)


class Parts:
    """Messages of all ranks, and this rank's part of its own, to be read in place."""

    def __init__(self, exchange: Exchange, arrivals: Sequence[Arrival], slot: Slot | None, own: Tensor, before: int) -> None:
        self._exchange, self._arrivals, self._slot, self._own, self._before = exchange, arrivals, slot, own, before

    def wait(self) -> None:
        for arrival in self._arrivals:
            arrival.wait()

    def read(self) -> list[Tensor]:
        """Return the parts of all ranks, flat and in order, once they are there; without those that are empty."""
        parts = [arrival.borrow(self._own.dtype) for arrival in self._arrivals]
        if self._slot is not None:
            parts.insert(self._before, self._own)
        return parts

    def release(self) -> None:
        """Give the memory back."""
        for arrival in self._arrivals:
            arrival.release()
        if self._slot is not None:
            self._exchange.has_read(self._slot)
        self._arrivals, self._slot = (), None

    def __del__(self) -> None:
        if self._arrivals or self._slot is not None:
            self._exchange.abandoned.append(self.release)


class Exchange:
    """Messages among the ranks of a process group, in order between each two of them. See `connect`.

    Args:
        rank: this one, in the group.
        segments: of all ranks.
        processes: of all ranks.
        timeout: seconds to wait for a message.

    Attributes:
        abandoned: functions that release messages which nobody waits for any more. `__del__` runs in any thread and at any point,
            so it only queues them; the next message calls them.
    """

    def __init__(
        self, rank: int, segments: Sequence[Segment], processes: Sequence[system.Process], signals: Signals, timeout: float
    ) -> None:
        self.rank, self.segments, self._processes, self._signals, self._timeout = rank, segments, processes, signals, timeout
        self._free: list[Slot] = []
        self._open: Slot | None = None  # what it holds is being made
        self._sent = [deque[Slot]() for _ in segments]  # and not read, by receiver
        self._due = [deque[Arrival]() for _ in segments]  # of which pieces are missing, by sender
        self._unread = [deque[Arrival]() for _ in segments]
        self._numbers = [[0, 0] for _ in segments]  # messages to and from a rank
        self._published = 0  # numbers
        self.abandoned = deque[Callable[[], None]]()
        self._lock = Lock()  # `post_reads` also runs in the thread of `DeviceCopies`
        self._is_pinned = False  # a device's driver holds the pages, and `trim` must leave them

    def space(self, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Return flat memory for the next message."""
        self._drop_unsent()
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        self._open = slot = self._take(nbytes)
        return self.segments[self.rank].view(slot.at, nbytes // dtype.itemsize, dtype)

    def trim(self) -> None:
        """Give all memory for messages back to the system, if none is under way, and no driver holds the pages of it."""
        if self._is_pinned:
            return
        own = self.segments[self.rank]
        self._drop_unsent()
        self._find_read()
        if sum(slot.size for slot in self._free) == own.size - own.begin:
            self._free.clear()
            own.shrink()

    def messages(self, arriving: Iterable[tuple[int, Tensor]], leaving: Iterable[tuple[int, Tensor]]) -> Received:
        """Send tensors to ranks, and receive others from ranks. All are bytes, of the CPU or of one device.

        Raises OSError: the system has no more memory. Then nothing has been sent."""
        arriving, leaving = ([each for each in some if each[1].numel()] for some in (arriving, leaving))
        copies = next((copies_of(tensor.device) for _, tensor in (*arriving, *leaving)), CPU_COPIES)
        self._is_pinned |= copies is not CPU_COPIES
        after = sent = copies.mark()
        receivers: dict[tuple[int, int], tuple[Tensor, list[int]]] = {}
        for rank, tensor in leaving:
            receivers.setdefault((tensor.data_ptr(), tensor.numel()), (tensor, []))[1].append(rank)
        # All memory before the first message: a failure behind one would leave its receiver without those that follow.
        slots = list[Slot]()
        try:
            slots += (self._take(tensor.numel()) for tensor, _ in receivers.values())
        except OSError:
            self._free += slots
            raise
        for slot, (tensor, ranks) in zip(slots, receivers.values(), strict=True):
            sent = self._send(slot, slot.at, tensor.numel(), ranks, tensor, copies, after)  # all are in one stream
        return Received(self, [(self._expect(rank, tensor.numel()), tensor) for rank, tensor in arriving], copies, after, sent)

    def parts(self, made: Tensor, sent: Sequence[int], arriving: Sequence[int]) -> Parts:
        """Send parts of the content of `space` to all ranks, and receive parts from all. `sent`, `arriving`: bytes."""
        slot, me, at = self._open or Slot(0, 0), self.rank, 0  # none where all parts are empty
        for rank, nbytes in enumerate(sent):
            if rank == me:
                begin = at
            elif nbytes:
                self._send(slot, slot.at + at, nbytes, (rank,))
            at += nbytes
        arrivals = [self._expect(rank, nbytes) for rank, nbytes in enumerate(arriving) if nbytes and rank != me]
        if not sent[me]:
            return Parts(self, arrivals, None, made, 0)
        slot.readers += 1  # this rank, which reads its own part there, too
        own = self.segments[me].view(slot.at + begin, sent[me] // made.element_size(), made.dtype)
        return Parts(self, arrivals, slot, own, sum(map(bool, arriving[:me])))

    def to_all(self, made: Tensor, arriving: Sequence[int]) -> list[Arrival | None]:
        """Send the content of `space` to all other ranks, and receive theirs. `arriving`: bytes. Return messages
        by rank: none from this one, and none that is empty."""
        others = [rank for rank in range(len(arriving)) if rank != self.rank]
        if self._open is not None:
            self._send(self._open, self._open.at, made.nbytes, others)
        return [self._expect(rank, arriving[rank]) if rank in others and arriving[rank] else None for rank in range(len(arriving))]

    def publish(self, value: int) -> int:
        """Publish a number of 64 bits to all ranks. Return the place for `published`, which is that of theirs, too."""
        self._published += 1
        self.segments[self.rank].publish(self._published, value)
        return self._published

    def published(self, place: int) -> list[int]:
        """Return the numbers of the ranks at a place, once they are there; without those of ranks that have published `PLACES` more
        since: after errors they look at none."""
        found = []
        for rank in range(len(self.segments)):
            with suppress(LookupError):
                found.append(self._published_by(rank, place))
        return found

    def _published_by(self, rank: int, place: int) -> int:
        segment = self.segments[rank]
        while (value := segment.published(place)) is None:
            self._wait(self._signals.until, lambda: segment.published(place) is not None, rank)
        return value

    def has_read(self, slot: Slot) -> None:
        slot.readers -= 1
        if not slot.readers:
            self._free.append(slot)
            if slot is self._open:
                self._open = None

    def wait_for(self, arrival: Arrival, missing: int) -> None:
        """Wait until no more pieces of a message are missing. Those before it from the same rank come first."""
        source = arrival.source
        while arrival.missing > missing:
            self._take_signal(self.segments[source].ready[self.rank], source)
            self._note_piece(source)

    def _note_piece(self, source: int) -> None:
        """Note a signal of a sender. It carries no number: senders raise it once per piece, in order, so it stands for the oldest
        message that lacks one."""
        first = self._due[source][0]
        first.missing -= 1
        first.at = self.segments[source].offset_of(self.rank, first.number)
        if first.missing:
            return
        self._due[source].popleft()
        if first.is_read:
            self.post_reads(source)

    def post_reads(self, source: int) -> None:
        """Signal the sender once for every message that is read, in order."""
        # Likewise: the sender takes each signal for its oldest message, so a later one that is read first has to wait.
        unread = self._unread[source]
        with self._lock:
            while unread and unread[0].is_read and not unread[0].missing:
                unread.popleft()
                self._signals.post(self.segments[source].read[self.rank])

    def _expect(self, source: int, nbytes: int) -> Arrival:
        self._release_abandoned()
        numbers, due = self._numbers[source], self._due[source]
        # After errors nobody may wait for this sender again, who would run out of places.
        while due and due[0].is_read and self._signals.try_take(self.segments[source].ready[self.rank]):
            self._note_piece(source)
        arrival = Arrival(self, source, nbytes, numbers[1])
        numbers[1] += 1
        due.append(arrival)
        self._unread[source].append(arrival)
        return arrival

    def _send(
        self,
        slot: Slot,
        at: int,
        nbytes: int,
        ranks: Sequence[int],
        source: Tensor | None = None,
        copies: Copies = CPU_COPIES,
        after: Any = None,
    ) -> Any:
        """Send bytes of a slot to ranks. `source`: they are still to be copied from there, behind an event. Return the event behind
        that copy."""

        def signal() -> None:
            for rank in ranks:
                self._signals.post(own.ready[rank])

        own, done = self.segments[self.rank], after
        for rank in ranks:
            # The only place where a sender waits: offsets are a ring, and the receiver has yet to read the oldest of them.
            if len(self._sent[rank]) == KEPT:
                self._take_signal(own.read[rank], rank)
                self.has_read(self._sent[rank].popleft())
            own.publish_offset(rank, self._numbers[rank][0], at)
            self._numbers[rank][0] += 1
            self._sent[rank].append(slot)
        slot.readers += len(ranks)
        for begin in range(0, nbytes, PIECE):
            if source is not None:
                count = min(PIECE, nbytes - begin)
                piece = source if count == nbytes else source[begin : begin + count]
                done = copies.start(own.view_for(source.device, at + begin, count), piece, after)
            copies.then(done, signal)
        return done

    def _take(self, nbytes: int) -> Slot:
        """Return memory that no rank reads any more, or more memory."""
        self._find_read()
        for slot in reversed(self._free):  # the last one is most likely still in a cache
            if nbytes <= slot.size <= MAX_SLACK * nbytes + mmap.PAGESIZE:
                self._free.remove(slot)
                return slot
        return Slot(*self.segments[self.rank].grow(nbytes))

    def _find_read(self) -> None:
        """Take back the memory of messages that receivers have read, and release those that this rank has abandoned."""
        self._release_abandoned()
        own = self.segments[self.rank]
        for rank, sent in enumerate(self._sent):
            while sent and self._signals.try_take(own.read[rank]):
                self.has_read(sent.popleft())

    def _release_abandoned(self) -> None:
        while self.abandoned:
            self.abandoned.popleft()()

    def _drop_unsent(self) -> None:
        # What was made there may have failed before it was sent.
        if self._open is not None and not self._open.readers:
            self._free.append(self._open)
        self._open = None

    def _take_signal(self, semaphore: int, rank: int) -> None:
        self._wait(self._signals.take, semaphore, rank)

    def _wait(self, wait: Callable[[Any, system.Process, float], None], what: Any, rank: int) -> None:
        """Wait for a rank. `wait`, `what`: a function of `Signals`, and what it waits for."""
        try:
            wait(what, self._processes[rank], self._timeout)
        except OtherEnded:
            raise dist.DistBackendError(f"Connection closed by peer: the process of rank {rank} of the group has ended") from None
        except TookTooLong:
            raise dist.DistBackendError(f"Timed out waiting {self._timeout:g} s for rank {rank} of the group") from None


_exchanges: WeakKeyDictionary[dist.ProcessGroup, Exchange | None] = WeakKeyDictionary()


def exchange_of(group: dist.ProcessGroup) -> Exchange | None:
    """Return the exchange of a group over gloo; make it if it does not exist, together with all ranks of the group. None: ranks are
    on several computers, or cannot map each other's memory."""
    if group not in _exchanges:
        _exchanges[group] = connect(group)
    return _exchanges[group]


def trim() -> None:
    """Give memory of all exchanges back that no message is in."""
    for exchange in _exchanges.values():
        if exchange is not None:
            exchange.trim()


def connect(group: dist.ProcessGroup) -> Exchange | None:
    """Map the memory of all ranks, or of none: all ranks of the group call this, and get the same answer."""
    rank, size, made = dist.get_rank(group), dist.get_world_size(group), _make(dist.get_world_size(group))
    own = torch.tensor([0] * 5 if made is None else [system.host_id(), os.getpid(), made[0].number, *made[0].token])
    addresses = [torch.zeros_like(own) for _ in range(size)]
    dist.all_gather(addresses, own, group=group)
    opened = [] if made is None else [each for address in addresses if (each := _open(address.tolist(), size, made[1]))]
    # All ranks or none: one that sends through memory and one that listens to the network would wait for each other forever.
    lacks = torch.tensor([made is None or len(opened) < size], dtype=torch.int64)
    dist.all_reduce(lacks, dist.ReduceOp.MAX, group=group)
    if made is None or lacks.item():
        return None
    timeout = timeout_of(group)
    segments, processes = [each[0] for each in opened], [each[1] for each in opened]
    return Exchange(rank, segments, processes, made[1], TIMEOUT if timeout is None else timeout.total_seconds())


def _make(size: int) -> tuple[Segment, Signals] | None:
    """Make this rank's segment, ready for messages; None where the system does not support it."""
    try:
        system.host_id()  # without it, no rank knows which others share its memory
        signals = Signals()
        return Segment(size, signals), signals
    except (AttributeError, OSError):
        return None


def _open(address: list[int], size: int, signals: Signals) -> tuple[Segment, system.Process] | None:
    """Open the segment of a rank; None: there is none, it cannot be opened from here, or it is another one."""
    where, pid, number, *token = address
    try:
        if where != system.host_id():
            return None
        segment, process = Segment(size, signals, (pid, number)), system.Process(pid)
    except (OSError, ValueError):
        return None
    return (segment, process) if [*segment.token] == token else None
