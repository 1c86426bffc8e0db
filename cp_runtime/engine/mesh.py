"""Process groups of the ranks, and how they exchange data."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..compat import flatten_mesh
from ..errors import ConfigError, PlanError
from .profiling import trace_range
from .sharding import Shares

AXES = ("ring", "ulysses")
MAKE_MESH = (
    'Make it by init_device_mesh(type, (1, 2), mesh_dim_names=("ring", "ulysses")); an axis that is not used has size 1, and there '
    "may be others."
)
KEPT_EVENTS = 1024  # pairs of device events; more are added up while the work goes on


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all it was given. A CPU has."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


class CommStats:
    """What one rank sent, in how many collectives of each kind, how long it waited for them, and how many are under way.

    Time is that of the device's clock where it has one. What overlaps with computation is not waited for and not counted.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.pending = 0
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    @property
    def collectives(self) -> int:
        """Collectives of every kind; an exchange with two neighbours is one."""
        return self.counts.total()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent in collectives of every kind."""
        return self.bytes.total()

    @property
    def seconds(self) -> float:
        """Time spent waiting for collectives. Waits for the last of them."""
        if self._events:
            self._events[-1][1].synchronize()
        self._add_up(len(self._events))
        return self._seconds

    def started(self, kind: str, sent: int) -> None:
        """Count one collective that sends `sent` bytes from this rank to others."""
        self.counts[kind] += 1
        self.bytes[kind] += sent
        self.pending += 1

    def wait(self, works: Sequence[Any], device: torch.device, on_host: bool) -> None:
        """Wait for the works of one collective and add the time that took."""
        if on_host or device.type == "cpu":
            began = time.perf_counter()
            for work in works:
                work.wait()
            self._seconds += time.perf_counter() - began
            self.pending -= 1
            return
        start, end = (torch.get_device_module(device).Event(enable_timing=True) for _ in range(2))
        start.record()
        for work in works:
            work.wait()
        end.record()
        self._events.append((start, end))
        self.pending -= 1
        if len(self._events) > KEPT_EVENTS:
            self._events[KEPT_EVENTS // 2][1].synchronize()
            self._add_up(KEPT_EVENTS // 2)

    def _add_up(self, count: int) -> None:
        self._seconds += sum(float(start.elapsed_time(end)) for start, end in self._events[:count]) / 1e3
        del self._events[:count]


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a flat view of its bytes."""
    return tensor.view(-1).view(torch.uint8)


class Pending:
    """Messages under way. What is sent must stay as it is, and what is received is not there, before `wait`."""

    def __init__(
        self, group: RankGroup, kind: str, works: Sequence[Any], device: torch.device, staged: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self._group, self._kind, self._works, self._device, self._staged = group, kind, works, device, staged

    def wait(self) -> None:
        """Wait until everything was sent and received."""
        with trace_range("cp.wait", self._kind):
            self._group.stats.wait(self._works, self._device, self._group.via_host)
            self._works = ()  # they hold what was sent
            for target, host in self._staged:
                target.copy_(host)


class RankGroup:
    """Ranks that share something along one axis of the mesh.

    Every collective moves exact sizes, which every rank derives on its own: none carries a size, and uneven ones need no padding.
    On NCCL each is one kernel. Data crosses as bytes, because not every backend knows every dtype.

    Args:
        group: process group, or None for a single process.
        stats: where to account for the collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None, stats: CommStats | None = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self._global_ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        self.stats = stats or CommStats()
        # gloo moves host memory only: accelerator tensors are staged through the host.
        self.via_host = group is not None and dist.get_backend(group) == "gloo"

    def all_to_all(
        self, send: Tensor, sent: Sequence[int], received: Tensor, arriving: Sequence[int], kind: str = "all_to_all"
    ) -> Pending:
        """Send a part of `send` to every rank, and receive a part of `received` from every rank, this one included.

        Args:
            send, received: contiguous, of one dtype and on one device.
            sent, arriving: elements for and from every rank, in the order of the ranks. Both sides know them.
            kind: what to count it as, and its name in traces.
        """
        size = send.element_size()
        staged: list[tuple[Tensor, Tensor]] = []
        with trace_range("cp." + kind):
            work = dist.all_to_all_single(
                as_bytes(self._landing(received, staged)),
                as_bytes(self._leaving(send)),
                [count * size for count in arriving],
                [count * size for count in sent],
                group=self.group,
                async_op=True,
            )
        self.stats.started(kind, send.nbytes - sent[self.rank] * size)
        return Pending(self, kind, [work], send.device, staged)

    def exchange(self, send: Tensor, received: Tensor) -> Pending:
        """Send a tensor to the next rank, and receive one from the rank before into `received`."""
        sent, arriving = [0] * self.size, [0] * self.size
        sent[(self.rank + 1) % self.size], arriving[self.rank - 1] = send.numel(), received.numel()
        return self.all_to_all(send, sent, received, arriving, "exchange")

    def all_gather(self, locals_: Sequence[Tensor], lengths: Sequence[int], dim: int) -> list[Tensor]:
        """Concatenate the shards of all ranks along `dim`, for each of some tensors; `lengths[r]` is rank r's size there.

        One batch of messages between pairs of ranks: torch's own gathers want shards of one size, or copy the whole.
        """
        if self.size == 1:
            return list(locals_)
        moved = [tensor.movedim(dim, 0) for tensor in locals_]
        whole = [tensor.new_empty((sum(lengths), *tensor.shape[1:])) for tensor in moved]
        shards = list(zip(*(tensor.split(list(lengths)) for tensor in whole), strict=True))
        for own, tensor in zip(shards[self.rank], moved, strict=True):
            own.copy_(tensor)
        operations: list[dist.P2POp] = []
        staged: list[tuple[Tensor, Tensor]] = []
        with trace_range("cp.all_gather"):
            sends = [self._leaving(own) for own in shards[self.rank] if own.numel()]
            for step in range(1, self.size):
                to, source = self.global_rank(self.rank + step), self.global_rank(self.rank - step)
                operations += [dist.P2POp(dist.isend, as_bytes(own), to, self.group) for own in sends]
                arriving = [self._landing(shard, staged) for shard in shards[(self.rank - step) % self.size] if shard.numel()]
                operations += [dist.P2POp(dist.irecv, as_bytes(shard), source, self.group) for shard in arriving]
            works = dist.batch_isend_irecv(operations) if operations else []
        self.stats.started("all_gather", sum(own.nbytes for own in shards[self.rank]) * (self.size - 1))
        Pending(self, "all_gather", works, whole[0].device, staged).wait()
        return [tensor.movedim(0, dim) for tensor in whole]

    def gather_parts(self, part: Tensor, whole: Tensor) -> Pending:
        """Put the parts of all ranks one behind the other into `whole`, `[size * part.numel()]`. All parts are of one size."""
        works: list[Any] = []
        staged: list[tuple[Tensor, Tensor]] = []
        with trace_range("cp.weights"):
            if self.size == 1:
                whole.copy_(part)
            else:
                target, source = self._landing(whole, staged), self._leaving(part)
                works.append(dist.all_gather_into_tensor(target, source, group=self.group, async_op=True))
        self.stats.started("weights", part.nbytes * (self.size - 1))
        return Pending(self, "weights", works, whole.device, staged)

    def twin(self, timeout: timedelta | None = None) -> RankGroup:
        """The same ranks with a process group of their own: what is sent on it waits for nothing that is sent on this one."""
        if self.group is None:
            return RankGroup(None, self.stats)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # as in make_groups
        made = dist.new_group(self._global_ranks, timeout, dist.get_backend(self.group), use_local_synchronization=True)
        dist.barrier(made)
        return RankGroup(made, self.stats)

    def largest(self, value: Tensor) -> Tensor:
        """The largest of the values of all ranks, element by element. `value` is contiguous, and may be overwritten."""
        if self.size == 1:
            return value
        with trace_range("cp.all_reduce"):
            shared = self._leaving(value)
            work = dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self.stats.started("all_reduce", value.nbytes)
        Pending(self, "all_reduce", [work], value.device, ()).wait()
        return shared.to(value.device)

    def _leaving(self, tensor: Tensor) -> Tensor:
        """What the backend sends in place of a tensor."""
        return tensor.cpu() if self.via_host else tensor

    def _landing(self, tensor: Tensor, staged: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Where the backend receives what is for a tensor; noted in `staged` where it has to be copied from there."""
        if not self.via_host or tensor.device.type == "cpu":
            return tensor
        host = torch.empty_like(tensor, device="cpu")
        staged.append((tensor, host))
        return host

    def global_rank(self, rank: int) -> int:
        """A rank of this group, counted around, as torch's point-to-point functions want it."""
        return self._global_ranks[rank % self.size]


@dataclass(frozen=True)
class SequenceAxes:
    """The ranks of a sequence as `ring` x `ulysses`, ulysses inner: rank = ring index * ulysses degree + ulysses index."""

    ring: RankGroup
    ulysses: RankGroup


class Groups:
    """The process groups of some ranks, each made when it is first asked for.

    Args:
        like: with this backend.
        timeout: of the groups; None = torch's default.
    """

    def __init__(self, like: dist.ProcessGroup | None, timeout: timedelta | None = None) -> None:
        self._like, self._timeout = like, timeout
        self._made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}

    def of(self, lists: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """This rank's group of the given ones; None where it is in none of them. All ranks ask alike. See `make_groups`."""
        key = tuple(map(tuple, lists))
        if key not in self._made:
            self._made[key] = make_groups(key, self._like, self._timeout)
        return self._made[key]


class SequenceMesh:
    """The ranks that share one sequence, and their groups for any ring and Ulysses degrees.

    Groups are made when degrees are first asked for, by all ranks alike: every rank must ask for the same.

    Args:
        group: process group of those ranks, or None for a single process.
        groups: makes those of its axes; None = new ones, with torch's default timeout.
        stats: where to account for the collectives.
        peers: ranks of all meshes that make their groups together with this one, itself included; None = it is the only one.
        shares: of the ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        groups: Groups | None = None,
        stats: CommStats | None = None,
        peers: Sequence[Sequence[int]] | None = None,
        shares: Shares = (),
    ) -> None:
        self.stats = stats or CommStats()
        self.whole = RankGroup(group, self.stats)
        self.shares = reduced(shares)
        self._groups, self._peers, self._world = groups or Groups(group), peers, dist.group.WORLD
        self._axes: dict[tuple[int, int], SequenceAxes] = {}

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, shares: Shares = ()) -> SequenceMesh:
        """Use the axes "ring" and "ulysses" of a mesh that has both, in this order, and may have more, such as "fsdp".

        Raises:
            ConfigError: the ranks do not ascend along them, or the mesh has outlived its process groups.
        """
        ranks = mesh[AXES].mesh.flatten().tolist()
        if ranks != sorted(ranks):  # torch orders the ranks of a group, so that a rank's place in it would not be that in the mesh
            raise ConfigError(
                f"mesh: got the ranks {ranks} along ring and ulysses; allowed: ascending ones, ulysses running fastest. "
                "Build it with init_device_mesh."
            )
        groups = flatten_mesh(mesh[AXES]), mesh["ring"], mesh["ulysses"]
        try:
            whole, ring, ulysses = (axis.get_group() for axis in groups)
            made = cls(whole, shares=shares)
            made._axes[groups[1].size(), groups[2].size()] = SequenceAxes(
                RankGroup(ring, made.stats), RankGroup(ulysses, made.stats)
            )
        except (KeyError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"mesh: got one without process groups ({error!r}); allowed: one made since init_process_group. Make it again."
            ) from error
        return made

    @property
    def is_alive(self) -> bool:
        """Whether torch.distributed is initialised as it was when this was made."""
        return self._world is dist.group.WORLD

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.whole.size

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.whole.rank

    @property
    def part(self) -> float:
        """The part of the tokens that this rank has."""
        return self.shares[self.rank] / sum(self.shares) if self.shares else 1 / self.size

    def head_shares(self, ulysses: int) -> Shares:
        """Of the heads, by place on the Ulysses axis: the same in every chunk of the ring, whose ranks must have the same heads."""
        return reduced(tuple(sum(self.shares[place::ulysses]) for place in range(ulysses))) if self.shares else ()

    def axes(self, ring: int, ulysses: int) -> SequenceAxes:
        """The groups of this rank for the given degrees.

        Raises:
            PlanError: their product is not the number of ranks.
        """
        if ring * ulysses != self.size:
            raise PlanError(f"ring_degree x ulysses_degree: got {ring} x {ulysses}; the sequence is shared by {self.size} ranks")
        if (ring, ulysses) not in self._axes:
            self._axes[ring, ulysses] = self._make(ring, ulysses)
        return self._axes[ring, ulysses]

    def _make(self, ring: int, ulysses: int) -> SequenceAxes:
        alone = RankGroup(None, self.stats)
        if ring == 1:
            return SequenceAxes(ring=alone, ulysses=self.whole)
        if ulysses == 1:
            return SequenceAxes(ring=self.whole, ulysses=alone)
        peers = self._peers or [dist.get_process_group_ranks(self.whole.group)]
        return SequenceAxes(*(RankGroup(self._groups.of(lists), self.stats) for lists in axis_ranks(peers, ring, ulysses)))


def axis_ranks(peers: Sequence[Sequence[int]], ring: int, ulysses: int) -> tuple[list[list[int]], list[list[int]]]:
    """Ranks that form a group on the axes ring and Ulysses, for each of some meshes."""
    columns = [list(ranks[u::ulysses]) for ranks in peers for u in range(ulysses)]
    return columns, [list(ranks[r * ulysses : (r + 1) * ulysses]) for ranks in peers for r in range(ring)]


class BatchMesh:
    """All ranks as `batch` x sequence, batch outermost: rank = batch index * ranks per sequence + rank in the sequence.

    Where ranks have shares and groups of neighbours would differ in theirs, ranks are mixed so that they differ less. Groups are in
    the order of their first ranks, and ranks ascend in each.

    Args:
        group: process group of all ranks.
        timeout: of the groups made for an axis.
        stats: where to account for the collectives.
        shares: of the ranks.
        groups: makes those of its axes; None = new ones.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: timedelta | None = None,
        stats: CommStats | None = None,
        shares: Shares = (),
        groups: Groups | None = None,
    ) -> None:
        self.stats = stats or CommStats()
        self.whole = RankGroup(group, self.stats)
        self.shares = reduced(shares)
        self._timeout = timeout
        self._groups = groups or Groups(group, timeout)
        self._meshes = {1: SequenceMesh(group, self._groups, self.stats, shares=shares)}
        self._teams: dict[tuple[int, ...], BatchMesh] = {}

    @cached_property
    def weights(self) -> RankGroup:
        """All ranks, on a process group for weights. All ranks ask alike."""
        return self.whole.twin(self._timeout)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.whole.size

    def sequence(self, groups: int = 1) -> SequenceMesh:
        """The ranks that share a sequence with this one, when there are that many batch groups. All ranks ask alike.

        Raises:
            PlanError: the ranks do not divide by it.
        """
        if self.size % groups:
            raise PlanError(f"{self.size} ranks cannot form {groups} batch groups of the same size")
        if groups not in self._meshes:
            members = self.members(groups)
            peers = [[self.whole.global_rank(rank) for rank in ranks] for ranks in members]
            group = self._groups.of(peers) if groups < self.size else None
            own = tuple(self.shares[rank] for rank in members[self.index(groups)]) if self.shares else ()
            self._meshes[groups] = SequenceMesh(group, self._groups, self.stats, peers, own)
        return self._meshes[groups]

    def team(self, ranks: Sequence[int], groups: int, ring: int, ulysses: int) -> BatchMesh | None:
        """Some ranks as a mesh, with the groups for these degrees; None on ranks that are not among them. All ranks ask alike.

        torch wants all ranks to be there when a group is made, those that are not in it as well.
        """
        own = tuple(self.shares[rank] for rank in ranks) if self.shares else ()
        everyone = [self.whole.global_rank(rank) for rank in ranks]
        group = self.whole.group if len(ranks) == self.size else self._groups.of([everyone]) if len(ranks) > 1 else None
        peers = [[everyone[rank] for rank in formed] for formed in form_groups(len(ranks), groups, reduced(own))]
        if 1 < groups < len(ranks):
            self._groups.of(peers)
        if ring > 1 and ulysses > 1:
            for lists in axis_ranks(peers, ring, ulysses):
                self._groups.of(lists)
        if len(ranks) == self.size:
            return self
        if self.whole.rank not in ranks:
            return None
        if tuple(ranks) not in self._teams:
            self._teams[tuple(ranks)] = BatchMesh(group, self._timeout, self.stats, own, self._groups)
        return self._teams[tuple(ranks)]

    def members(self, groups: int) -> list[list[int]]:
        """Ranks of every batch group."""
        return form_groups(self.size, groups, self.shares)

    def index(self, groups: int) -> int:
        """The batch group of this rank."""
        return next(index for index, ranks in enumerate(self.members(groups)) if self.whole.rank in ranks)

    def group_shares(self, groups: int) -> Shares:
        """Of batch groups: together those of their ranks."""
        return reduced(tuple(sum(self.shares[rank] for rank in ranks) for ranks in self.members(groups))) if self.shares else ()


def reduced(shares: Shares) -> Shares:
    """Shares in lowest terms; none where they are equal."""
    divisor = math.gcd(*shares)
    return tuple(share // divisor for share in shares) if len(set(shares)) > 1 else ()


@lru_cache(maxsize=64)
def form_groups(ranks: int, groups: int, shares: Shares) -> list[list[int]]:
    """Groups of as many ranks each: of neighbours, unless the group with the least share gets more when ranks are mixed.

    Mixed means that every rank, the one with the largest share first, goes to the group that has least so far.
    """
    each = ranks // groups
    neighbours = [list(range(start, start + each)) for start in range(0, ranks, each)]
    if not shares:
        return neighbours
    mixed: list[list[int]] = [[] for _ in range(groups)]
    for rank in sorted(range(ranks), key=lambda rank: -shares[rank]):
        min((group for group in mixed if len(group) < each), key=lambda group: sum(shares[r] for r in group)).append(rank)

    def least(formed: list[list[int]]) -> int:
        return min(sum(shares[rank] for rank in group) for group in formed)

    return sorted(sorted(group) for group in mixed) if least(mixed) > least(neighbours) else neighbours


def make_groups(lists: Sequence[Sequence[int]], like: dist.ProcessGroup | None, timeout: timedelta | None) -> Any:
    """Make the groups of the given ranks, and return this rank's, if it is in one. Connected at once.

    That happens in the middle of a forward, when degrees are chosen for the first time: each NCCL group takes device memory, and
    most that might be chosen never are.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # NCCL splits a communicator while nothing is under way on it
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in lists], timeout=timeout, backend=dist.get_backend(like))
    if group is not None:
        dist.barrier(group)  # later a rank may have nothing to send at first
    return group
