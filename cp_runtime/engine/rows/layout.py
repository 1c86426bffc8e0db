"""Which rows of an image belong to which rank: pure arithmetic, as in `engine.sharding`.

A VAE processes the same picture at several resolutions. Rows are counted at the coarsest one, the latent's; a tensor with `scale`
times as many rows is split at `scale` times the same positions, so that up- and downsampling by whole numbers stays local.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ..sharding import JointLayout, Segment, Shares, split_ranges


@dataclass(frozen=True)
class RowLayout:
    """Rows (or columns) of the latent and the ranks that share them.

    A rank without rows of its own holds the first ones as *stand-ins*: it computes on them, but never sends or returns the result.

    Args:
        total: number of rows.
        world_size: number of ranks.
        least: rows that a rank needs at least; if there are fewer per rank, some ranks have none.
        shares: share of each rank, as far as each then gets `least` rows.
    """

    total: int
    world_size: int
    least: int = 1
    shares: Shares = ()

    @cached_property
    def parts(self) -> int:
        """Number of ranks that have rows: the first ones."""
        return max(1, min(self.world_size, self.total // self.least))

    @cached_property
    def _ranges(self) -> tuple[Segment, ...]:
        ranges = split_ranges(self.total, self.parts, self.shares[: self.parts])
        return ranges if min(stop - start for start, stop in ranges) >= self.least else split_ranges(self.total, self.parts)

    def owned(self, rank: int) -> Segment:
        """Return (start, stop) of the rows whose results a rank contributes; may be empty."""
        return self._ranges[rank] if rank < self.parts else (0, 0)

    def held(self, rank: int) -> Segment:
        """Return (start, stop) of the rows that a rank computes."""
        start, stop = self.owned(rank)
        return (start, stop) if stop > start else (0, min(self.least, self.total))

    def sizes(self, scale: int = 1) -> list[int]:
        """Return how many rows every rank contributes at a resolution with `scale` rows for each of the latent's."""
        return [(stop - start) * scale for start, stop in map(self.owned, range(self.world_size))]

    def tokens(self, unit: int) -> RowTokens:
        """Return the layout of attention tokens made from these rows, `unit` tokens for each."""
        return RowTokens((self.total * unit,), self.world_size, rows=self, unit=unit)

    def needed(self, rank: int, scale: int, above: int, below: int) -> tuple[Segment, Segment]:
        """Return (start, stop) of the other ranks' rows that a rank needs, above and below its own, at `scale` rows for each."""
        start, stop = (scale * row for row in self.owned(rank))
        if stop == start:
            return (0, 0), (0, 0)
        return (max(0, start - above), start), (stop, min(self.total * scale, stop + below))


@dataclass(frozen=True)
class RowTokens(JointLayout):
    """Tokens of an attention that were made of rows. Tokens of a row stay together.

    The order of a rank's tokens is left open: attention without a mask does not depend on it.

    Args:
        rows: rows of the latent.
        unit: tokens for each of them.
    """

    rows: RowLayout = field(default=RowLayout(1, 1), kw_only=True)
    unit: int = field(default=1, kw_only=True)

    def _segments(self, rank: int) -> Iterator[tuple[tuple[Segment, ...], tuple[Segment, ...]]]:
        held, (start, stop) = self.rows.held(rank), self.rows.owned(rank)
        owned = ((start * self.unit, stop * self.unit),) if stop > start else ()
        yield ((held[0] * self.unit, held[1] * self.unit),), owned
