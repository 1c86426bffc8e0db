"""Which rows of an image belong to which rank: pure arithmetic, as in `engine.sharding`.

A VAE works on the same picture at several resolutions. Rows are counted at the coarsest one, that of the latent; a tensor with
`scale` times as many is split at `scale` times the same places, so that up- and downsampling by whole numbers stays local.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ..sharding import JointLayout, Segment, Shares, split_ranges


@dataclass(frozen=True)
class RowLayout:
    """Rows of the latent (or its columns) and the ranks that share them.

    A rank without rows of its own holds the first ones as *stand-ins*: it computes on them, and none of that is sent or returned.

    Args:
        total: rows.
        world_size: number of ranks.
        least: rows that a rank needs at least; with fewer per rank, some ranks have none.
        shares: of the ranks, as far as each gets what it needs at least.
    """

    total: int
    world_size: int
    least: int = 1
    shares: Shares = ()

    @cached_property
    def parts(self) -> int:
        """Ranks that have rows: the first ones."""
        return max(1, min(self.world_size, self.total // self.least))

    @cached_property
    def _ranges(self) -> tuple[Segment, ...]:
        ranges = split_ranges(self.total, self.parts, self.shares[: self.parts])
        return ranges if min(stop - start for start, stop in ranges) >= self.least else split_ranges(self.total, self.parts)

    def owned(self, rank: int) -> Segment:
        """(start, stop) of the rows whose result a rank contributes; may be empty."""
        return self._ranges[rank] if rank < self.parts else (0, 0)

    def held(self, rank: int) -> Segment:
        """(start, stop) of the rows that a rank computes."""
        start, stop = self.owned(rank)
        return (start, stop) if stop > start else (0, min(self.least, self.total))

    def sizes(self, scale: int = 1) -> list[int]:
        """What every rank contributes, at a resolution of `scale` rows for each."""
        return [(stop - start) * scale for start, stop in map(self.owned, range(self.world_size))]

    def tokens(self, unit: int) -> RowTokens:
        """The same rows as tokens of an attention, `unit` for each."""
        return RowTokens((self.total * unit,), self.world_size, rows=self, unit=unit)

    def needed(self, rank: int, scale: int, above: int, below: int) -> tuple[Segment, Segment]:
        """Rows of others that a rank needs next to its own: (start, stop) above and below, at `scale` rows for each."""
        start, stop = (scale * row for row in self.owned(rank))
        if stop == start:
            return (0, 0), (0, 0)
        return (max(0, start - above), start), (stop, min(self.total * scale, stop + below))


@dataclass(frozen=True)
class RowTokens(JointLayout):
    """Tokens of an attention that were made of rows: those of a row stay together.

    The order among the tokens of a rank is left open. Attention without a mask does not depend on it.

    Args:
        rows: of the latent.
        unit: tokens for each of them.
    """

    rows: RowLayout = field(default=RowLayout(1, 1), kw_only=True)
    unit: int = field(default=1, kw_only=True)

    def _segments(self, rank: int) -> Iterator[tuple[tuple[Segment, ...], tuple[Segment, ...]]]:
        held, (start, stop) = self.rows.held(rank), self.rows.owned(rank)
        owned = ((start * self.unit, stop * self.unit),) if stop > start else ()
        yield ((held[0] * self.unit, held[1] * self.unit),), owned
