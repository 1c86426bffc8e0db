"""Rows of an image on ranks, and their neighbouring rows, fetched from other ranks.

A VAE processes the same picture at several resolutions. Rows are counted at the coarsest one, the latent's; a tensor with `scale`
times as many rows is split at `scale` times the same positions, so that up- and downsampling by whole numbers stays local.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ranks.collectives import RankGroup
from ..ranks.sharding import JointLayout, Segment, Shares, Split, joint_layout


def row_layout(rows: int, world_size: int, least: int = 1, shares: Shares = (), unit: int = 1) -> JointLayout:
    """Return the layout of the latent's rows (or columns) on the ranks, or of the attention tokens made of them, `unit` for each
    row.

    A rank without rows holds the first ones as *stand-ins*: it computes on them, but never sends or returns the result.

    Args:
        least: minimum of rows per rank; with fewer, some ranks have none.
        shares: share of each rank, as far as each then gets `least` rows.
    """
    return joint_layout((rows * unit,), world_size, (Split(unit=unit, least=least),), shares)


def needed(layout: JointLayout, rank: int, scale: int, above: int, below: int) -> tuple[Segment, Segment]:
    """Return (start, stop) of the other ranks' rows that a rank needs, above and below its rows, at `scale` rows for each."""
    start, stop = (scale * row for row in layout.contributed(rank))
    if stop == start:
        return (0, 0), (0, 0)
    return (max(0, start - above), start), (stop, min(layout.total * scale, stop + below))


class Neighbours:
    """Rows above and below those of a rank, in flight in one collective. Every rank must start it, needed or not.

    Args:
        own: this rank's rows, without padding.
        dim: dimension that counts rows, from the end.
        layout: rows of the latent.
        scale: rows of `own` for each row of the latent.
        above, below: number of rows wanted on either side.

    Attributes:
        missing: numbers of wanted rows beyond the picture's edges.
    """

    def __init__(self, group: RankGroup, own: Tensor, dim: int, layout: JointLayout, scale: int, above: int, below: int) -> None:
        self._own, self._dim = own, dim
        ranks, me, per_row = range(group.size), group.rank, own.numel() // own.shape[dim]
        # Of every rank, as both sides of a message derive its rows: none carries a size.
        wanted = [needed(layout, rank, scale, above, below) for rank in ranks]
        there = [tuple(scale * row for row in layout.contributed(rank)) for rank in ranks]
        self._counts = [stop - start for start, stop in wanted[me]]
        self.missing = above - self._counts[0], below - self._counts[1]

        def of(source: int, to: int) -> list[Segment]:
            """Return the rows of a rank that another rank wants."""
            found = [(max(start, there[source][0]), min(stop, there[source][1])) for start, stop in wanted[to]]
            return [(start, stop) for start, stop in found if start < stop]

        leaving = [[own.narrow(dim, start - there[me][0], stop - start) for start, stop in of(me, rank)] for rank in ranks]
        sent = [sum(part.numel() for part in parts) for parts in leaving]
        self._arriving = [sum(stop - start for start, stop in of(rank, me)) * per_row for rank in ranks]
        self._received = own.new_empty(sum(self._arriving))
        send = torch.cat([own.new_empty(0), *(part.reshape(-1) for parts in leaving for part in parts)])
        self._pending = group.all_to_all(send, sent, self._received, self._arriving, "halo")

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the rows above and below, in order, with zeros for missing ones."""
        self._pending.wait()
        # Ranks ascend with their rows, and a rank lies either above or below this one.
        whole = torch.cat([rows_of(part, self._own, self._dim) for part in self._received.split(self._arriving)], self._dim)
        above, below = whole.split(self._counts, self._dim)
        before, after = self.missing
        other = [0, 0] * (-1 - self._dim)  # dimensions behind the rows, as `pad` counts them
        return pad(above, [*other, before, 0]) if before else above, pad(below, [*other, 0, after]) if after else below


def rows_of(flat: Tensor, like: Tensor, dim: int) -> Tensor:
    """Shape flat elements as rows along `dim`, with the other dimensions of `like`."""
    shape = list(like.shape)
    shape[dim] = -1
    return flat.view(shape)
