"""Rows next to a rank's own, fetched from the ranks that have them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives import RankGroup
from .layout import RowLayout


class Neighbours:
    """Rows above and below a rank's own, in flight in one collective. Every rank must start it, needed or not.

    Args:
        own: this rank's rows, without padding.
        dim: dimension that counts rows, from the end.
        layout: rows of the latent.
        scale: rows of `own` for each row of the latent.
        above, below: number of rows wanted on either side.
    """

    def __init__(self, group: RankGroup, own: Tensor, dim: int, layout: RowLayout, scale: int, above: int, below: int) -> None:
        self._own, self._dim = own, dim
        me = group.rank
        wanted = [layout.needed(rank, scale, above, below) for rank in range(group.size)]
        mine = _scaled(layout.owned(me), scale)
        self._above, self._below = (stop - start for start, stop in wanted[me])
        per_row = own.numel() // own.shape[dim]
        sent: list[int] = []
        leaving: list[Tensor] = []
        arriving: list[int] = []
        for rank in range(group.size):
            theirs = [_overlap(mine, side) for side in wanted[rank]] if rank != me else []
            rows = [own.narrow(dim, start - mine[0], stop - start) for start, stop in theirs if stop > start]
            leaving += [part.reshape(-1) for part in rows]
            sent.append(sum(part.numel() for part in rows))
            ours = [_overlap(_scaled(layout.owned(rank), scale), side) for side in wanted[me]] if rank != me else []
            arriving.append(sum(max(0, stop - start) for start, stop in ours) * per_row)
        self._received, self._arriving = own.new_empty(sum(arriving)), arriving
        self._pending = group.all_to_all(torch.cat([own.new_empty(0), *leaving]), sent, self._received, arriving, "halo")

    def wait(self) -> Sides:
        """Return the rows above and below, in order; fewer than requested at the edges of the picture."""
        self._pending.wait()
        # Ranks ascend with their rows, and a rank lies either above or below this one.
        whole = torch.cat([rows_of(part, self._own, self._dim) for part in self._received.split(self._arriving)], self._dim)
        return Sides(whole.narrow(self._dim, 0, self._above), whole.narrow(self._dim, self._above, self._below))


class Sides(NamedTuple):
    """Rows above and below."""

    above: Tensor
    below: Tensor


def rows_of(flat: Tensor, like: Tensor, dim: int) -> Tensor:
    """Shape flat elements as rows along `dim`, with the other dimensions of `like`."""
    shape = list(like.shape)
    shape[dim] = -1
    return flat.view(shape)


def _scaled(segment: tuple[int, int], scale: int) -> tuple[int, int]:
    return segment[0] * scale, segment[1] * scale


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])
