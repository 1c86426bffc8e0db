"""The batch axis: items of a batch, computed by different groups of ranks at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..nested import map_tensors
from .mesh import BatchMesh
from .sharding import Shares, split_ranges


@dataclass(frozen=True)
class BatchShares:
    """How the items of one call are shared out over groups of ranks.

    Args:
        groups: of ranks, each computing some items.
        items: size of dimension 0 of what is stacked.
        unit: items that belong together, as the frames of a video where they are stacked.
        stacked: names of the arguments that are stacked.
        shares: of the groups.
        copies: of every group's work: so many times as many groups take part, and the results of the first ones count.
    """

    groups: int
    items: int
    unit: int
    stacked: frozenset[str]
    shares: Shares = ()
    copies: int = 1

    @property
    def taking_part(self) -> int:
        """Groups that compute, copies included."""
        return self.groups * self.copies

    def owned(self, group: int) -> tuple[int, int]:
        """(start, stop) of the items whose result a group contributes; may be empty."""
        if group >= self.groups:
            return 0, 0
        start, stop = split_ranges(self.items // self.unit, self.groups, self.shares)[group]
        return start * self.unit, stop * self.unit

    def held(self, group: int) -> tuple[int, int]:
        """(start, stop) of the items that a group computes: its own, or the first ones in the place of none."""
        start, stop = self.owned(group % self.groups)
        return (start, stop) if stop > start else (0, self.unit)

    def take(self, arguments: Mapping[str, Any], group: int) -> dict[str, Any]:
        """A group's part of the arguments of a call. Views, not copies."""
        if self.groups == 1:
            return dict(arguments)
        start, stop = self.held(group)
        return {k: map_tensors(v, lambda t: t[start:stop]) if k in self.stacked else v for k, v in arguments.items()}

    def gather(self, out: Any, mesh: BatchMesh) -> Any:
        """Put the groups' outputs together: a tensor, or a list or tuple of tensors, with items along dimension 0."""
        if self.groups == 1:
            return out
        lengths = [0] * mesh.size
        for group, ranks in enumerate(mesh.members(self.taking_part)):
            start, stop = self.owned(group)
            lengths[ranks[0]] = stop - start  # the first rank of every group speaks for it
        own = lengths[mesh.whole.rank]
        return map_tensors(out, lambda t: mesh.whole.all_gather([t[:own]], lengths, 0)[0])
