"""Ulysses: exchange token shards for head shards and back. Attention in between is over whole chunks, for a share of the heads.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509. Beyond it: exact uneven lengths and head counts, and one packed
collective for all tensors of the same tokens.

Shape suffixes: B batch, L tokens of this rank, C tokens of the chunk in gathered order, D head dimension. N heads come in *units*:
one key/value head and its query heads. Units are dealt out to the ranks as `torch.tensor_split` would; with fewer units than ranks,
some ranks get none: they take part in the collectives and skip the attention.

| step | shape on rank r |
|---|---|
| in: several tensors, each with `width` heads per unit | `[B, L_r, N, D]` |
| sent to rank p | `[L_r, B, units_p * width, D]` of each |
| received, from all ranks into one buffer of each | `[C, B, units_r * width, D]` |
| out: a view of it, with tokens as far apart as attention kernels like them | `[B, units_r * width, C, D]` |
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..mesh import Pending, RankGroup
from ..sharding import split_ranges, split_sizes


def repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """How often key/value heads are repeated, as little as possible, so that every rank gets one if query heads suffice."""
    per_key = heads // kv_heads
    return next((n for n in range(1, per_key + 1) if per_key % n == 0 and kv_heads * n >= ranks), per_key)


class HeadExchange:
    """The exchange for one attention.

    Args:
        group: the ranks of one chunk.
        units: head units that are dealt out.
    """

    def __init__(self, group: RankGroup, units: int) -> None:
        self._group = group
        self._ranges = split_ranges(units, group.size)
        self._sizes = split_sizes(units, group.size)
        self._units = units
        self.own = self._sizes[group.rank]

    @property
    def own_range(self) -> tuple[int, int]:
        """Units that this rank attends with."""
        return self._ranges[self._group.rank]

    def to_heads(self, tensors: Sequence[Tensor], lengths: Sequence[int]) -> PendingHeads:
        """Begin to send this rank's tokens, all heads, and to receive the chunk's tokens, own heads. One collective.

        Args:
            tensors: `[B, L, N_i, D]`, the same tokens; N_i is a multiple of the number of units.
            lengths: tokens of every rank of the chunk.
        """
        B, _, _, D = tensors[0].shape
        widths = [tensor.shape[2] // self._units for tensor in tensors]
        whole = [t.new_empty((sum(lengths), B, self.own * width, D)) for t, width in zip(tensors, widths, strict=True)]
        receives = list(zip(*(t.split(list(lengths)) for t in whole), strict=True))
        shares = [
            [t[:, :, first * width : last * width].transpose(0, 1) for t, width in zip(tensors, widths, strict=True)]
            for first, last in self._ranges
        ]
        own = self._group.rank
        sends = [[] if r == own else [t.contiguous() for t in share] for r, share in enumerate(shares)]
        pending = self._group.swap("all_to_all", sends, receives, tensors[0].device)
        for kept, share in zip(receives[own], shares[own], strict=True):  # while the rest is under way
            kept.copy_(share)
        return PendingHeads(pending, whole, sends)

    def to_tokens(self, out_BHCD: Tensor, lengths: Sequence[int], heads_per_unit: int) -> Tensor:
        """Send back attention outputs: `[B, own heads, C, D]` -> `[B, L, all heads, D]`. One collective."""
        B, _, _, D = out_BHCD.shape
        own, heads = self._group.rank, [n * heads_per_unit for n in self._sizes]
        L = lengths[own]
        sends = [[part.contiguous()] for part in out_BHCD.permute(2, 0, 1, 3).split(list(lengths))]
        receives = [[] if r == own else [out_BHCD.new_empty((L, B, n, D))] for r, n in enumerate(heads)]
        pending = self._group.swap("all_to_all", sends, receives, out_BHCD.device)
        out_LBHD = out_BHCD.new_empty((L, B, sum(heads), D))
        parts = out_LBHD.split(heads, 2)
        parts[own].copy_(sends[own][0])
        pending.wait()
        for r, part in enumerate(parts):
            if r != own:
                part.copy_(receives[r][0])
        return out_LBHD.transpose(0, 1)


class PendingHeads:
    """Tensors on their way to `to_heads`' result."""

    def __init__(self, pending: Pending, whole: list[Tensor], sends: list[list[Tensor]]) -> None:
        self._pending, self._whole, self._sends = pending, whole, sends

    def wait(self) -> list[Tensor]:
        """`[B, own heads, C, D]` of each tensor."""
        self._pending.wait()
        self._sends.clear()
        return [t.permute(1, 2, 0, 3) for t in self._whole]
