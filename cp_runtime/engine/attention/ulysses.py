"""Ulysses: exchange token shards for head shards and back. Attention in between is over whole chunks, for a share of the heads.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509. Beyond it: exact uneven lengths and head counts, and one packed
collective for all tensors of the same tokens.

Shape suffixes: B batch, L tokens of this rank, C tokens of the chunk in gathered order, D head dimension. N heads come in *units*:
one key/value head and its query heads. Units are dealt out to the ranks like tokens (`sharding.split_sizes`); with too few,
some ranks get none: they take part in the collectives and skip the attention.

| step | shape on rank r |
|---|---|
| in: several tensors, each with `width` heads per unit | `[B, L_r, N, D]` |
| sent to rank p: all tensors side by side | `[L_r, B, units_p * sum of widths, D]` |
| received, from all ranks into one buffer | `[C, B, units_r * sum of widths, D]` |
| out: a view of it for each tensor | `[B, units_r * width, C, D]` |

For any number of ranks the host launches one collective and one copy per tensor, or two where ranks get different numbers of units:
a denoise step on a fast GPU is so short that the time of each launch would show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from torch import Tensor

from ..collectives import RankGroup
from ..sharding import Shares, split_ranges, split_sizes


def repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """Return the least repetition of key/value heads that gives every rank one, as far as there are query heads."""
    per_key = heads // kv_heads
    return next((n for n in range(1, per_key + 1) if per_key % n == 0 and kv_heads * n >= ranks), per_key)


class HeadExchange:
    """The exchange for one attention: `units` head units, dealt out to the ranks of one chunk by their shares."""

    def __init__(self, group: RankGroup, units: int, shares: Shares = ()) -> None:
        self._group, self._units = group, units
        self.own_range = split_ranges(units, group.size, shares)[group.rank]  # (start, stop) that this rank attends with
        self._sizes = split_sizes(units, group.size, shares)
        # (first unit, number of ranks, units of each) for runs of neighbouring ranks with equally many units, at least one
        self._runs: list[tuple[int, int, int]] = []
        first = 0
        for each, same in groupby(self._sizes):
            ranks = len(list(same))
            self._runs += [(first, ranks, each)] if each else []
            first += ranks * each
        self._own = self._sizes[group.rank]

    def to_heads(self, tensors: Sequence[Tensor], lengths: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Start exchanging this rank's tokens with all heads for the chunk's tokens with this rank's heads. One collective.

        Args:
            tensors: `[B, L, N_i, D]`, the same tokens, of one dtype; N_i is a multiple of the number of units.
            lengths: tokens of every rank of the chunk.

        Returns:
            A function that waits, and returns each tensor as `[B, own heads, C, D]`.
        """
        B, L, _, D = tensors[0].shape
        widths = [tensor.shape[2] // self._units for tensor in tensors]
        unit = B * D * sum(widths)  # elements per token and unit
        send = tensors[0].new_empty(L * unit * self._units)
        for first, ranks, units in self._runs:
            block = send[L * unit * first : L * unit * (first + ranks * units)].view(ranks, L, B, units * sum(widths), D)
            for part, tensor, width in zip(block.split([units * w for w in widths], 3), tensors, widths, strict=True):
                part.copy_(_by_rank(tensor, first, ranks, units, width).permute(2, 1, 0, 3, 4))
        heads = [self._own * width for width in widths]
        whole = send.new_empty((sum(lengths), B, sum(heads), D))
        sent, arriving = [L * unit * n for n in self._sizes], [length * unit * self._own for length in lengths]
        pending = self._group.all_to_all(send, sent, whole, arriving)

        def wait() -> list[Tensor]:
            pending.wait()
            return [t.permute(1, 2, 0, 3) for t in whole.split(heads, 2)]

        return wait

    def to_tokens(self, out_BHCD: Tensor, lengths: Sequence[int], heads_per_unit: int) -> Tensor:
        """Send attention outputs back: `[B, own heads, C, D]` -> `[B, L, all heads, D]`. One collective."""
        B, _, _, D = out_BHCD.shape
        L, unit = lengths[self._group.rank], B * D * heads_per_unit
        send = out_BHCD.permute(2, 0, 1, 3).contiguous()
        received = send.new_empty(L * unit * self._units)
        sent, arriving = [length * unit * self._own for length in lengths], [L * unit * n for n in self._sizes]
        self._group.all_to_all(send, sent, received, arriving).wait()
        out_BLHD = send.new_empty((L, B, self._units * heads_per_unit, D)).transpose(0, 1)
        for first, ranks, units in self._runs:
            block = received[L * unit * first : L * unit * (first + ranks * units)].view(ranks, L, B, units * heads_per_unit, D)
            _by_rank(out_BLHD, first, ranks, units, heads_per_unit).copy_(block.permute(2, 1, 0, 3, 4))
        return out_BLHD


def _by_rank(tensor: Tensor, first: int, ranks: int, units: int, width: int) -> Tensor:
    """Return a view `[B, L, ranks, heads of each, D]` of `[B, L, N, D]`, beginning at head unit `first`."""
    B, L, _, D = tensor.shape
    return tensor[:, :, first * width : (first + ranks * units) * width].view(B, L, ranks, units * width, D)
