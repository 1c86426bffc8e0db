"""Ulysses attention: exchange token shards for head shards, attend to the whole sequence, exchange back.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509. Beyond it: exact uneven lengths and uneven head counts, one
packed collective for q, k and v (2 collectives per attention), grouped heads (GQA) and masks.

Shape suffixes: B batch, L tokens of this rank (stand-ins are taken out before, and zero in the result), S tokens of all ranks in
gathered order, H query heads, K key/value heads, h and k the heads that this rank attends with, D head dimension.

| step | shape on rank r |
|---|---|
| in: q, k, v | `[B, L_r, H, D]`, `[B, L_r, K, D]` |
| after the first all-to-all | `[S, B, h_r + 2 k_r, D]` |
| attention | `[B, h_r, S, D]` |
| after the second all-to-all | `[B, L_r, H, D]` |

Heads are dealt out in units of one key/value head with its query heads. With fewer units than ranks, some ranks get none:
they take part in the collectives and skip the attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import PlanError
from ..mesh import SequenceGroup
from ..sharding import JointLayout, split_range, split_sizes

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def ulysses_attention(
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    *,
    layout: JointLayout,
    group: SequenceGroup,
    attend: Attend,
    mask: Tensor | None = None,
    anything: bool = True,
) -> Tensor:
    """Attend from this rank's tokens to the tokens of all ranks.

    Args:
        q_BLHD, k_BLKD, v_BLKD: this rank's shards; H must be a multiple of K.
        layout: token ranges of every rank.
        group: the ranks that share the sequence.
        attend: `(q_BhSD, k_BkSD, v_BkSD, mask) -> out_BhSD` over this rank's heads.
        mask: in gathered order, `[..., S or 1, S]`; with four dimensions, dimension 1 is heads (H or 1).
        anything: False refuses lengths and head counts that do not divide by the number of ranks.

    Returns:
        `[B, L, H, D]`, this rank's tokens, all heads.

    Raises:
        PlanError: shapes do not fit the layout, or do not divide although `anything` is False.
    """
    B, L, H, D = q_BLHD.shape
    K, P, rank = k_BLKD.shape[2], group.size, group.rank
    if H % K or v_BLKD.shape != k_BLKD.shape or k_BLKD.shape[:2] != (B, L):
        raise PlanError(f"attention shapes do not match: q {tuple(q_BLHD.shape)}, k {tuple(k_BLKD.shape)}, v {tuple(v_BLKD.shape)}")
    if layout.local_lengths[rank] != L:
        raise PlanError(f"rank {rank} has {L} tokens in attention; its layout says {layout.local_lengths[rank]}")
    if not anything and (K % P or any(length % P for length in layout.lengths)):
        raise PlanError(
            f"ulysses_anything is off and {P} ranks do not divide {K} key/value heads and streams of "
            f"{', '.join(map(str, layout.lengths))} tokens. Turn ulysses_anything on, or change size or world size."
        )
    queries_per_key = H // K
    owned = layout.owned_positions(rank)
    if owned is not None:  # stand-ins are not sent
        q_BLHD, k_BLKD, v_BLKD = (t.index_select(1, owned.to(t.device)) for t in (q_BLHD, k_BLKD, v_BLKD))
        L = layout.owned_lengths[rank]
    kv_heads = split_sizes(K, P)
    width = queries_per_key + 2  # heads that travel per key/value head: its queries, itself, its value

    send = q_BLHD.new_empty(B * L * K * width * D)
    offset = 0
    for p in range(P):
        k0, k1 = split_range(K, P, p)
        h0, h1 = k0 * queries_per_key, k1 * queries_per_key
        count = B * L * (k1 - k0) * width * D
        chunk_LBhD = send[offset : offset + count].view(L, B, (k1 - k0) * width, D)
        torch.cat([q_BLHD[:, :, h0:h1], k_BLKD[:, :, k0:k1], v_BLKD[:, :, k0:k1]], 2, out=chunk_LBhD.transpose(0, 1))
        offset += count
    own = kv_heads[rank]
    received = group.all_to_all(
        send,
        [B * L * n * width * D for n in kv_heads],
        [length * B * own * width * D for length in layout.owned_lengths],
    )
    h, S = own * queries_per_key, layout.total
    qkv_BhSD = received.view(S, B, own * width, D).permute(1, 2, 0, 3)
    if own:
        if mask is not None and mask.ndim == 4 and mask.shape[1] == H > 1:
            first = split_range(K, P, rank)[0] * queries_per_key
            mask = mask[:, first : first + h]
        out_BhSD = attend(qkv_BhSD[:, :h], qkv_BhSD[:, h : h + own], qkv_BhSD[:, h + own :], mask)
    else:
        out_BhSD = qkv_BhSD
    back_sizes = [L * B * n * queries_per_key * D for n in kv_heads]
    back = group.all_to_all(
        out_BhSD.permute(2, 0, 1, 3).reshape(-1),
        [length * B * h * D for length in layout.owned_lengths],
        back_sizes,
    )
    parts = [part.view(L, B, n * queries_per_key, D) for part, n in zip(back.split(back_sizes), kv_heads, strict=True)]
    out_BLHD = torch.cat(parts, 2).transpose(0, 1)
    if owned is None:
        return out_BLHD
    held = out_BLHD.new_zeros((B, layout.local_lengths[rank], H, D))
    return held.index_copy(1, owned.to(held.device), out_BLHD)
