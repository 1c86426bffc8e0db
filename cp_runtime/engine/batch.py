"""The batch axis: groups of ranks that compute different items of a batch at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..nested import map_tensors
from .mesh import BatchMesh
from .sharding import Shares, split_ranges


@dataclass(frozen=True)
class BatchShares:
    """How the items of a call are shared out over groups of ranks.

    Args:
        groups: number of groups, each of which computes some items.
        items: size of dimension 0 of what is stacked.
        unit: number of items that belong together, as the frames of a video where they are stacked.
        stacked: names of the arguments that are stacked.
        shares: share of each group; empty = equal shares.
        copies: how often each group's work is computed, by as many times more groups; the first ones' results count.
    """

    groups: int
    items: int
    unit: int
    stacked: frozenset[str]
    shares: Shares = ()
    copies: int = 1

    @property
    def taking_part(self) -> int:
        """Number of groups that compute, copies included."""
        return self.groups * self.copies

    def owned(self, group: int) -> tuple[int, int]:
        """Return (start, stop) of the items whose results a group contributes; may be empty."""
        if group >= self.groups:
            return 0, 0
        start, stop = split_ranges(self.items // self.unit, self.groups, self.shares)[group]
        return start * self.unit, stop * self.unit

    def held(self, group: int) -> tuple[int, int]:
        """Return (start, stop) of the items that a group computes: its own, or the first ones if it has none."""
        start, stop = self.owned(group % self.groups)
        return (start, stop) if stop > start else (0, self.unit)

    def take(self, arguments: Mapping[str, Any], group: int) -> dict[str, Any]:
        """Return a group's part of a call's arguments, as views."""
        if self.groups == 1:
            return dict(arguments)
        start, stop = self.held(group)
        return {k: map_tensors(v, lambda t: t[start:stop]) if k in self.stacked else v for k, v in arguments.items()}

    def gather(self, out: Any, mesh: BatchMesh) -> Any:
        """Concatenate the groups' outputs along dimension 0: a tensor, or a list or tuple of tensors."""
        if self.groups == 1:
            return out
        lengths = [0] * mesh.size
        for group, ranks in enumerate(mesh.members(self.taking_part)):
            start, stop = self.owned(group)
            lengths[ranks[0]] = stop - start  # a group's first rank contributes for all of it
        own = lengths[mesh.whole.rank]
        return map_tensors(out, lambda t: mesh.whole.all_gather([t[:own]], lengths, 0)[0])
