"""Process groups of the ranks that share a sequence, a batch, or an axis of either, created on first use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from datetime import timedelta
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...compat import flatten_mesh, timeout_of
from ...errors import ConfigError, PlanError
from ...nested import map_tensors
from ..exchange.exchange import exchange_of
from .collectives import CommStats, RankGroup
from .sharding import BatchShares, Shares

AXES = ("ring", "ulysses")


class SequenceAxes(NamedTuple):
    """Groups of a sequence's ranks, arranged as `ring` x `ulysses`: rank = ring index * ulysses degree + ulysses index."""

    ring: RankGroup
    ulysses: RankGroup


class Groups:
    """Process groups of a mesh. Each is created on first use, by all ranks of the world and in the same order.

    torch names a process's groups by a running number. If only some ranks created a group, all later groups would wait for each
    other.

    Args:
        like: group whose backend they use.
        timeout: timeout of the groups; None = torch's default.

    Attributes:
        are_closed: no more groups can be created, because not all ranks are here.
    """

    def __init__(self, like: dist.ProcessGroup | None, timeout: timedelta | None = None) -> None:
        self._backend, self._timeout, self.are_closed = None if like is None else dist.get_backend(like), timeout, False
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = {}  # None on non-members

    def of(self, lists: Sequence[Sequence[int]], use: str = "tokens") -> dist.ProcessGroup | None:
        """Return the group among the given ones that contains this rank, or None. See `make_groups`.

        Args:
            lists: global ranks of every group.
            use: messages for different uses, even among the same ranks, do not wait for each other.

        Raises:
            PlanError: the group does not exist yet, and not all ranks are here to create it.
        """
        keys = [(use, tuple(ranks)) for ranks in lists]
        missing = [key for key in keys if key not in self._made]
        if missing and self.are_closed:
            raise PlanError(
                f"process groups of the ranks {[ranks for _, ranks in missing]} were not made while all ranks were there"
            )
        # By all ranks of the world, members or not. An NCCL group takes device memory for good, so for one use the same ranks share
        # one.
        if missing:
            made, own = make_groups([ranks for _, ranks in missing], self._backend, self._timeout), dist.get_rank()
            self._made |= {key: made if own in key[1] else None for key in missing}
        return next((group for key in keys if (group := self._made[key]) is not None), None)

    def closed(self) -> Groups:
        """Return these groups for use by some of the ranks, which cannot create more on their own."""
        known = copy(self)
        known.are_closed = True
        return known


# By world: the groups of one that was destroyed must not outlive it.
_groups_by_world: WeakKeyDictionary[dist.ProcessGroup, dict[Any, Groups]] = WeakKeyDictionary()


def groups_of_world(like: dist.ProcessGroup | None, timeout: timedelta | None = None) -> Groups:
    """Return the world's `Groups` for a backend and timeout, `like`'s by default. All meshes share it: no group exists twice."""
    world = dist.group.WORLD
    if like is None or world is None:
        return Groups(None)
    timeout = timeout or timeout_of(like)
    return _groups_by_world.setdefault(world, {}).setdefault((dist.get_backend(like), timeout), Groups(like, timeout))


class SequenceMesh:
    """Ranks that share one sequence, and their process groups for any ring and Ulysses degrees.

    Groups are created when degrees are first requested, so all ranks must request the same ones.

    Args:
        group: process group of these ranks, or None for a single process.
        groups: creates the groups of the axes; None = those of the world, with the timeout of `group`.
        stats: where collectives are counted.
        peers: global ranks of all meshes that create their groups together with this one, itself included; None = only this one.
        shares: share of each rank; empty = equal shares.

    Attributes:
        plans: cached plans of attentions among these ranks, by shapes.
        kernels: kernels that were asked for, by form of attention; None = not every rank can run it.
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
        self._groups, self._world = groups or groups_of_world(group), dist.group.WORLD
        self._peers = peers or [[self.whole.global_rank(rank) for rank in range(self.size)]]
        self._axes: dict[tuple[int, int], SequenceAxes] = {}
        self.plans: dict[object, Any] = {}
        self.kernels: dict[object, str | None] = {}

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, shares: Shares = ()) -> SequenceMesh:
        """Build it from a mesh with axes "ring" and "ulysses", in this order; the mesh may have others, such as "fsdp".

        Raises ConfigError if the ranks do not ascend along them, or the mesh has outlived its process groups.
        """
        ranks = mesh[AXES].mesh.flatten().tolist()
        if ranks != sorted(ranks):  # torch sorts a group's ranks: indices in it and in the mesh would differ
            raise ConfigError(
                f"mesh: got the ranks {ranks} along ring and ulysses; allowed: ascending ones, ulysses running fastest. "
                "Build it with init_device_mesh."
            )
        groups = flatten_mesh(mesh[AXES]), mesh["ring"], mesh["ulysses"]
        axes = [list(mesh.mesh_dim_names or ()).index(axis) for axis in AXES]
        rows = mesh.mesh.movedim(axes, (-2, -1)).flatten(-2).reshape(-1, len(ranks)).tolist()
        try:
            whole, ring, ulysses = (axis.get_group() for axis in groups)
            made = cls(whole, peers=rows, shares=shares)
            made._axes[groups[1].size(), groups[2].size()] = SequenceAxes(
                RankGroup(ring, made.stats), RankGroup(ulysses, made.stats)
            )
        except (KeyError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"mesh: got one without process groups ({error!r}); allowed: one made since init_process_group. Make it again."
            ) from error
        return made

    @cached_property
    def weights(self) -> RankGroup:
        """These ranks on a separate process group for weights, created by all ranks of the world.

        Where the meshes of other ranks are unknown, it is the group for tokens, and weights wait for tokens.
        """
        if self.size == 1 or sum(map(len, self._peers)) < dist.get_world_size():
            return self.whole
        return RankGroup(self._groups.of(self._peers, "weights"), self.stats)

    @property
    def is_alive(self) -> bool:
        """Whether the process group of its creation still exists."""
        return self._world is dist.group.WORLD

    @property
    def size(self) -> int:
        return self.whole.size

    @property
    def rank(self) -> int:
        return self.whole.rank

    @property
    def part(self) -> float:
        """Fraction of the tokens that this rank holds."""
        return self.shares[self.rank] / sum(self.shares) if self.shares else 1 / self.size

    def head_shares(self, ulysses: int) -> Shares:
        """Return the shares of the heads by index on the Ulysses axis; every chunk of the ring must divide the heads alike."""
        return reduced(tuple(sum(self.shares[place::ulysses]) for place in range(ulysses))) if self.shares else ()

    def axes(self, ring: int, ulysses: int) -> SequenceAxes:
        """Return this rank's process groups for the given degrees. Raises PlanError unless their product is the number of ranks."""
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
        return SequenceAxes(*(RankGroup(self._groups.of(lists), self.stats) for lists in axis_ranks(self._peers, ring, ulysses)))


def how_to_make_a_mesh() -> str:
    """Return the remedy for a mesh of all ranks, for messages."""
    ranks = dist.get_world_size() if dist.is_initialized() else 2
    return f'Call init_device_mesh(type, (1, {ranks}), mesh_dim_names=("ring", "ulysses")).'


def factors(ranks: int) -> Iterator[tuple[int, int]]:
    """Yield every (ring, ulysses) whose product is the number of ranks."""
    return ((ring, ranks // ring) for ring in range(1, ranks + 1) if ranks % ring == 0)


def axis_ranks(peers: Sequence[Sequence[int]], ring: int, ulysses: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks of every group on the ring axis, and on the Ulysses axis, for several meshes."""
    columns = [list(ranks[u::ulysses]) for ranks in peers for u in range(ulysses)]
    return columns, [list(ranks[r * ulysses : (r + 1) * ulysses]) for ranks in peers for r in range(ring)]


class BatchMesh(SequenceMesh):
    """All ranks arranged as `batch` x sequence: rank = batch index * ranks per sequence + rank in the sequence.

    If ranks have shares, and groups of neighbours would have unequal totals, ranks are mixed to even them out. Groups are ordered
    by their first rank, and ranks ascend within a group.

    Args:
        timeout: timeout of the groups that are created for an axis; None = that of `group`.
        group, stats, shares, groups, peers: see `SequenceMesh`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: timedelta | None = None,
        stats: CommStats | None = None,
        shares: Shares = (),
        groups: Groups | None = None,
        peers: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(group, groups or groups_of_world(group, timeout), stats, peers, shares)
        self._meshes: dict[int, SequenceMesh] = {}
        self._stages: dict[int, Stage] = {}
        self._firsts: dict[int, BatchMesh | None] = {}

    def sequence(self, groups: int = 1) -> SequenceMesh:
        """Return the ranks that share a sequence with this one when there are `groups` batch groups. All ranks must ask alike.
        Raises PlanError if the ranks do not divide by it."""
        if self.size % groups:
            raise PlanError(f"{self.size} ranks cannot form {groups} batch groups of the same size")
        if groups == 1:
            return self
        if groups not in self._meshes:
            members = self.members(groups)
            peers = [[everyone[rank] for rank in ranks] for everyone in self._peers for ranks in members]
            group = self._groups.of(peers) if groups < self.size else None
            own = tuple(self.shares[rank] for rank in members[self.index(groups)]) if self.shares else ()
            made = self._meshes[groups] = SequenceMesh(group, self._groups, self.stats, peers, own)
            # Unequal groups may choose different degrees, and then could not create groups together.
            if self.shares and not self._groups.are_closed:
                for ring, ulysses in factors(made.size):
                    made.axes(ring, ulysses)
        return self._meshes[groups]

    def stage(self, stages: int) -> Stage:
        """Return this rank's stage when neighbours form `stages` of the same size, the last one first. All ranks must ask alike.
        Raises PlanError if the ranks do not divide by it."""
        if self.size % stages:
            raise PlanError(f"{self.size} ranks cannot form {stages} stages of the same size")
        if stages not in self._stages:
            each = self.size // stages
            everyone = [self.whole.global_rank(rank) for rank in range(self.size)]
            rows, lanes = [everyone[at : at + each] for at in range(0, self.size, each)], [everyone[at::each] for at in range(each)]
            group, lane = self._groups.of(rows) if each > 1 else None, self._groups.of(lanes, "stages")
            peers = BatchMesh(group, None, self.stats, (), self._groups, [[rank] for rank in everyone] if each == 1 else rows)
            self._stages[stages] = Stage(peers, RankGroup(lane, self.stats))
        return self._stages[stages]

    def stage_shares(self, stages: int) -> Shares:
        """Return the shares of the stages, first to last: the sums of their ranks' shares."""
        each = self.size // stages
        return tuple(sum(self.shares[at : at + each]) for at in range(0, self.size, each))[::-1] if self.shares else ()

    def first(self, count: int) -> BatchMesh | None:
        """Return a mesh of the first ranks, with every group that their calls may need; None on all other ranks. All ranks must ask
        alike: torch creates a group only if all take part, members or not."""
        if count == self.size:
            return self
        if count not in self._firsts:
            everyone, shares = [self.whole.global_rank(rank) for rank in range(count)], reduced(self.shares[:count])
            group = self._groups.of([everyone]) if count > 1 else None
            for groups, each in factors(count):
                peers = [[everyone[rank] for rank in formed] for formed in form_groups(count, groups, shares)]
                if 1 < groups < count:
                    self._groups.of(peers)
                for ring, ulysses in factors(each):
                    if ring > 1 and ulysses > 1:
                        for lists in axis_ranks(peers, ring, ulysses):
                            self._groups.of(lists)
            made = BatchMesh(group, None, self.stats, shares, self._groups.closed()) if self.rank < count else None
            self._firsts[count] = made
        return self._firsts[count]

    @cached_property
    def alone(self) -> BatchMesh:
        return BatchMesh(None, None, self.stats)

    def members(self, groups: int) -> list[list[int]]:
        return form_groups(self.size, groups, self.shares)

    def index(self, groups: int) -> int:
        return next(index for index, ranks in enumerate(self.members(groups)) if self.rank in ranks)

    def gather(self, shares: BatchShares, out: Any) -> Any:
        """Concatenate the groups' outputs along dimension 0: a tensor, or a list or tuple of tensors."""
        if shares.groups == 1:
            return out
        lengths = [0] * self.size
        for group, ranks in enumerate(self.members(shares.groups)):
            start, stop = shares.owned(group)
            lengths[ranks[0]] = stop - start  # a group's first rank contributes for all of it
        own = lengths[self.whole.rank]
        return map_tensors(out, lambda t: self.whole.all_gather([t[:own]], lengths, 0)[0])

    def group_shares(self, groups: int) -> Shares:
        """Return the shares of the batch groups: the sums of their ranks' shares."""
        return reduced(tuple(sum(self.shares[rank] for rank in ranks) for ranks in self.members(groups))) if self.shares else ()


class Stage(NamedTuple):
    """A stage of a model. `ranks`: its ranks. `pipeline_group`: one rank of each stage, the last stage first."""

    ranks: BatchMesh
    pipeline_group: RankGroup


def reduced(shares: Shares) -> Shares:
    """Return the shares in lowest terms; empty if they are equal."""
    divisor = math.gcd(*shares)
    return tuple(share // divisor for share in shares) if len(set(shares)) > 1 else ()


@lru_cache(maxsize=64)
def form_groups(ranks: int, groups: int, shares: Shares) -> list[list[int]]:
    """Form groups of equal size: neighbours, unless mixing ranks gives the weakest group a larger share.

    Mixing is greedy: each rank, largest share first, joins the group with the smallest total so far.
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


def make_groups(lists: Sequence[Sequence[int]], backend: str | None, timeout: timedelta | None) -> Any:
    """Create and connect groups of the given ranks. Return this rank's group, or None.

    This may happen in the middle of a forward, when degrees are first chosen: every NCCL group takes device memory for good, and
    most candidates are never chosen.
    """
    backend = backend or dist.get_backend(None)
    if backend != "gloo":  # gloo uses no device, and synchronising would open one on CPU ranks
        torch.accelerator.synchronize()  # NCCL can only split an idle communicator
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in lists], timeout=timeout, backend=backend)
    if group is not None:
        dist.barrier(group)  # connects it; later a rank may have nothing to send at first
        if backend == "gloo":
            exchange_of(group)  # with all of them, too: their first message may be one between two of them
    return group
