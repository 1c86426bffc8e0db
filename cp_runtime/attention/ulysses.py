"""Ulysses: exchange token shards for head shards and back. Attention in between is over whole chunks, for a share of the heads.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509. Beyond it: exact uneven lengths and head counts, and one packed
collective for all tensors of the same tokens.

Shape suffixes: B batch, L tokens of this rank, C tokens of the chunk in gathered order, D head dimension. N heads come in *units*:
one key/value head and its query heads. Units are dealt out to the ranks as `torch.tensor_split` would; with fewer units than ranks,
some ranks get none: they take part in the collectives and skip the attention.

| step | shape on rank r |
|---|---|
| in: several tensors, each with `width` heads per unit | `[B, L_r, N, D]` |
| sent to rank p, heads of all tensors side by side | `[L_r, B, units_p * sum(width), D]` |
| received | `[C, B, units_r * sum(width), D]` |
| out: views of it | `[B, units_r * width, C, D]` |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..mesh import Pending, SequenceGroup
from ..sharding import split_range, split_sizes


class HeadExchange:
    """The exchange for one attention.

    Args:
        group: the ranks of one chunk.
        units: head units that are dealt out.
    """

    def __init__(self, group: SequenceGroup, units: int) -> None:
        self._group = group
        self._ranges = [split_range(units, group.size, p) for p in range(group.size)]
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
        B, L, _, D = tensors[0].shape
        widths = [tensor.shape[2] // self._units for tensor in tensors]
        total = sum(widths)
        send = tensors[0].new_empty(B * L * self._units * total * D)
        offset = 0
        for first, last in self._ranges:
            count = B * L * (last - first) * total * D
            part_LBND = send[offset : offset + count].view(L, B, (last - first) * total, D)
            shares = [tensor[:, :, first * width : last * width] for tensor, width in zip(tensors, widths, strict=True)]
            torch.cat(shares, 2, out=part_LBND.transpose(0, 1))
            offset += count
        pending = self._group.all_to_all(
            send, [B * L * n * total * D for n in self._sizes], [length * B * self.own * total * D for length in lengths]
        )
        return PendingHeads(pending, (sum(lengths), B, self.own * total, D), [width * self.own for width in widths])

    def to_tokens(self, out_BHCD: Tensor, lengths: Sequence[int], heads_per_unit: int) -> Tensor:
        """Send back attention outputs: `[B, own heads, C, D]` -> `[B, L, all heads, D]`. One collective."""
        B, H, _, D = out_BHCD.shape
        L = lengths[self._group.rank]
        sizes = [L * B * n * heads_per_unit * D for n in self._sizes]
        received = self._group.all_to_all(
            out_BHCD.permute(2, 0, 1, 3).reshape(-1), [length * B * H * D for length in lengths], sizes
        ).wait()
        parts = [part.view(L, B, n * heads_per_unit, D) for part, n in zip(received.split(sizes), self._sizes, strict=True)]
        return torch.cat(parts, 2).transpose(0, 1)


class PendingHeads:
    """Tensors on their way to `to_heads`' result."""

    def __init__(self, pending: Pending, shape: tuple[int, int, int, int], heads: list[int]) -> None:
        self._pending, self._shape, self._heads = pending, shape, heads

    def wait(self) -> list[Tensor]:
        """`[B, own heads, C, D]` of each tensor, views of one buffer."""
        return list(self._pending.wait().view(self._shape).permute(1, 2, 0, 3).split(self._heads, 1))
