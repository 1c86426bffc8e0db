"""Context-parallel attention: every token of this rank attends to the tokens of all ranks, exactly.

All modes share one path. With Ulysses degree U and ring degree R, U * R = ranks:

1. Ulysses (U > 1): exchange tokens for heads, so that this rank has all tokens of its chunk for its share of the heads.
2. Attention over the chunks of the ring (R > 1), or over the only chunk (R = 1).
3. Ulysses back.

Without a ring, the heads may go in several *rounds*: the heads of a round attend while those of the next round arrive and the
results of the previous round leave. The result is the same, bit for bit.

| mode | collectives per attention | bytes sent per rank, in units of S * H * D * element size |
|---|---|---|
| Ulysses | 2 a round (one more where queries and keys are different tokens; 4 above `PACKED_LIMIT`) | 4 (U - 1) / U^2 |
| ring alltoall | R - 1 exchanges | 2 (R - 1) / R |
| ring allgather | 1 | 2 (R - 1) / R |
| unified | the sum of both | (4 (U - 1) / U + 2 (R - 1)) / (U R) |

In 8 bits (`eight_bits`) an element has one byte, and a head of a token four more.

A mask over only this rank's keys costs one more, small collective. No collective carries a size.

Shape suffixes: B batch, L tokens of this rank, H query heads, K key/value heads, S all tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import PlanError
from ..ranks.collectives import RankGroup
from ..ranks.config import EIGHT_BIT, ContextParallelConfig
from ..ranks.mesh import SequenceMesh
from ..ranks.sharding import JointLayout, chunk_spans, split_sizes
from . import eight_bits
from .kernels import additive, attend_with_lse, select
from .ring import rotate
from .ulysses import HeadExchange, Program, repeats

Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]

Memo = Callable[[object, Any, Callable[[], Any]], Any]
"""`once(key, source, make)` returns `make()`, computed once per call for the object `source`."""

# Above this many bytes q, k and v are sent one after the other, so that packing one overlaps with sending another.
PACKED_LIMIT = 256 << 20
PLANS = 32  # cached per mesh


def sdpa(scale: float | None = None, causal: bool = False) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        if q.shape[1] != k.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=causal)

    return attend


def ordered(attend: Attend, q_layout: JointLayout, k_layout: JointLayout) -> Attend:
    """Return the function for tokens in gathered order, given one for all tokens in joint order."""

    def in_joint_order(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask = k_layout.to_joint(mask, -1)
            mask = mask if mask.shape[-2] == 1 else q_layout.to_joint(mask, -2)
        return q_layout.to_gathered(attend(q_layout.to_joint(q, 2), k_layout.to_joint(k, 2), k_layout.to_joint(v, 2), mask), 2)

    return attend if q_layout.in_order and k_layout.in_order else in_joint_order


def context_parallel_attention(
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    *,
    mesh: SequenceMesh,
    config: ContextParallelConfig,
    q_layout: JointLayout,
    k_layout: JointLayout | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    attend: Attend | None = None,
    kernel: str | None = None,
    once: Memo = lambda key, source, make: make(),
) -> Tensor:
    """Attend from this rank's tokens to the tokens of all ranks.

    Args:
        q_BLHD, k_BLKD, v_BLKD: this rank's shards; H is a multiple of K.
        mesh: the ranks that share the sequence.
        config: degrees and method; its degrees multiply to the number of ranks.
        q_layout: tokens of every rank.
        k_layout: the same for keys and values, if their tokens are not those of the queries.
        mask: boolean (True = visible) or additive, `[..., rows, keys]`: all keys and all rows (or one) in joint order; or one row
            over this rank's keys. A third dimension from the end is heads (1 or H), a fourth is batch.
        causal: no query sees a later key, in joint order. Only without `mask` and `attend`.
        scale: factor for the scores; None = 1 / sqrt(D).
        attend: `(q_BHSD, k_BKSD, v_BKSD, mask) -> out_BHSD`, used where no log-sum-exp is needed; None = torch's.
        kernel: name of the kernel to use where one is needed (see `kernels`); None = the first suitable one.
        once: caches values computed from a mask that comes with every block.

    Returns:
        `[B, L, H, D]`, this rank's tokens, all heads.

    Raises:
        PlanError: shapes do not fit the layouts, or do not divide although the config says they must.
    """
    k_layout = k_layout or q_layout
    if causal and (mask is not None or attend is not None):
        raise PlanError("causal attention takes neither a mask nor another function than torch's: neither would be applied to it")
    if torch.is_grad_enabled() and (q_BLHD.requires_grad or k_BLKD.requires_grad or v_BLKD.requires_grad):
        raise PlanError("context-parallel attention has no backward: run the model under torch.inference_mode() or torch.no_grad()")
    plan = _planned(q_BLHD, k_BLKD, v_BLKD, mesh, config, q_layout, k_layout)
    if plan.is_straight and mask is None and not causal and q_BLHD.dtype == k_BLKD.dtype == v_BLKD.dtype:
        made = partial(Program, plan.exchanges[0], q_BLHD, k_BLKD)
        program: Program = once(("program", id(plan), q_BLHD.dtype), q_layout, made)
        return program(q_BLHD, k_BLKD, v_BLKD, attend or sdpa(scale))
    ring, U, H, K, rows, spans, lengths, exchanges, *_ = plan
    rank, device = mesh.rank, q_BLHD.device
    # With allgather a rank sees all keys at once: nothing to merge, so any kernel will do.
    merging = ring.size > 1 and config.rotate_method == "alltoall"
    # A kernel's own causal mask compares positions in its inputs: right where these are all tokens, in the model's order.
    by_kernel = causal and ring.size == 1 and k_layout is q_layout and q_layout.in_order
    if mask is not None or (causal and not by_kernel):
        layouts, merged_as = (q_layout, k_layout), q_BLHD.dtype if merging else None
        if mask is not None:
            mask = once(("mask", U, *layouts, merged_as), mask, partial(_place, mask, mesh, rows, *layouts, merged_as))
        else:
            mask = once(("causal", U, *layouts, merged_as), q_layout, partial(_causal, device, rows, *layouts, merged_as))

    q_owned, k_owned = q_layout.owned_positions(rank, device), k_layout.owned_positions(rank, device)
    q_BLHD, k_BLKD, v_BLKD = contributed(q_BLHD, k_BLKD, v_BLKD, q_owned, k_owned, K)
    with_lse: Callable[..., tuple[Tensor, Tensor]] | None = None
    if merging:
        with_lse = partial(attend_with_lse, scale=scale, kernel=_kernel_of_all(kernel, q_BLHD, k_BLKD, mask, mesh))
    kernels = attend or sdpa(scale, by_kernel), with_lse

    def over_chunks(qkv: list[Tensor], units: tuple[int, int]) -> Tensor:
        return _over_chunks(ring, qkv, mask_of_heads(mask, units, H, K), spans, *kernels, config)

    if U == 1:
        out_BLHD = over_chunks([t.transpose(1, 2) for t in (q_BLHD, k_BLKD, v_BLKD)], (0, K)).transpose(1, 2)
    else:
        out_BLHD = attend_in_rounds(exchanges, q_BLHD, k_BLKD, v_BLKD, lengths, H // K, over_chunks, config.exchange == EIGHT_BIT)
    held_BLHD = held(out_BLHD, q_owned, q_layout.local_lengths[rank])
    # Also with an empty share: every rank holds all of a replicated stream, and takes part in its gather.
    for share, place, shares in q_layout.replicated(rank):
        held_BLHD[:, place] = mesh.whole.all_gather([out_BLHD[:, share]], shares, 1)[0]
    return held_BLHD


def contributed(
    q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, q_owned: Tensor | None, k_owned: Tensor | None, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens at `q_owned` and `k_owned` (None = all), with as many heads of keys and values as `kv_heads`."""
    if q_owned is not None:
        q_BLHD = q_BLHD.index_select(1, q_owned)
    if k_owned is not None:
        k_BLKD, v_BLKD = (t.index_select(1, k_owned) for t in (k_BLKD, v_BLKD))
    if (times := kv_heads // k_BLKD.shape[2]) > 1:
        k_BLKD, v_BLKD = (t.repeat_interleave(times, 2) for t in (k_BLKD, v_BLKD))
    return q_BLHD, k_BLKD, v_BLKD


def mask_of_heads(mask: Tensor | None, units: tuple[int, int], heads: int, kv_heads: int) -> Tensor | None:
    """Return a mask for some of the heads. `units`: the first of their key/value heads, and the one behind the last."""
    if mask is None or mask.ndim < 3 or mask.shape[-3] != heads or heads == 1:
        return mask
    return mask[..., units[0] * (heads // kv_heads) : units[1] * (heads // kv_heads), :, :]


def held(out_BLHD: Tensor, owned: Tensor | None, length: int) -> Tensor:
    """Return results for `length` tokens, given those of the tokens at `owned` (None = all); the others are 0."""
    if owned is None:
        return out_BLHD
    return out_BLHD.new_zeros((out_BLHD.shape[0], length, *out_BLHD.shape[2:])).index_copy_(1, owned, out_BLHD)


def _kernel_of_all(kernel: str | None, q: Tensor, k: Tensor, mask: Tensor | None, mesh: SequenceMesh) -> str | None:
    """Return the requested kernel if every rank can run it: with different kernels, the parts of a picture would differ."""
    # A collective, once per key. So the key has nothing that differs between ranks, such as numbers of tokens: all miss together.
    key = kernel, q.dtype, q.shape[-1], mask is None
    if kernel is not None and key not in mesh.kernels:
        lacks = select(q.transpose(1, 2), k.transpose(1, 2), mask, kernel).name != kernel
        all_can = not mesh.whole.largest(torch.tensor([float(lacks)], device=q.device)).item()
        mesh.kernels[key] = kernel if all_can else None
    return mesh.kernels[key] if kernel is not None else None


class _Plan(NamedTuple):
    """The plan of an attention on this rank. It depends on shapes, not on tensors."""

    ring: RankGroup
    ulysses: int
    heads: int
    kv_heads: int  # repeated, so that every rank gets one if there are enough query heads
    rows: slice  # those of this rank's chunk, in gathered order
    spans: tuple[slice, ...]  # keys of every chunk
    lengths: tuple[tuple[int, ...], tuple[int, ...]]  # queries and keys of every rank of this rank's chunk
    exchanges: tuple[HeadExchange, ...]  # one for every round
    is_straight: bool  # Ulysses alone, of equal parts, between devices
    made_for: object  # held because it is known by its id


def _planned(
    q: Tensor, k: Tensor, v: Tensor, mesh: SequenceMesh, config: ContextParallelConfig, q_layout: JointLayout, k_layout: JointLayout
) -> _Plan:
    """Return the plan of an attention, cached for all blocks of a model: making it takes the host longer than an exchange."""
    key = id(config), id(q_layout), id(k_layout), q.shape, k.shape, v.shape
    plan: _Plan | None = mesh.plans.get(key)
    if plan is not None:
        return plan
    _check(q, k, v, mesh, config, q_layout, k_layout)
    ring, ulysses = mesh.axes(*config.mesh_shape)
    U, H = ulysses.size, q.shape[2]
    K, shares, chunk = k.shape[2] * repeats(H, k.shape[2], U), mesh.head_shares(U), mesh.rank // U
    members = slice(chunk * U, (chunk + 1) * U)
    # Beside a ring one: two groups of ranks might wait for each other (`RankGroup.may_overlap`), and the ring overlaps anyway.
    rounds = min(config.ulysses_rounds, max(split_sizes(K, U, shares))) if ring.size == 1 else 1
    if len(mesh.plans) >= PLANS:
        mesh.plans.clear()
    plan = mesh.plans[key] = _Plan(
        ring, U, H, K, chunk_spans(q_layout, U)[chunk], chunk_spans(k_layout, U),
        (q_layout.owned_lengths[members], k_layout.owned_lengths[members]),
        tuple(HeadExchange(ulysses, K, shares, index, rounds) for index in range(rounds)),
        _is_straight(q, k, ulysses, rounds, mesh, config, q_layout, k_layout),
        (config, q_layout, k_layout),
    )  # fmt: skip
    return plan


def _is_straight(
    q: Tensor,
    k: Tensor,
    ulysses: RankGroup,
    rounds: int,
    mesh: SequenceMesh,
    config: ContextParallelConfig,
    q_layout: JointLayout,
    k_layout: JointLayout,
) -> bool:
    """Return whether an attention without a mask is a `Program`: nothing is uneven, and nothing overlaps."""
    U, (B, L, H, D), K = ulysses.size, q.shape, k.shape[2]
    alike = k_layout is q_layout and not mesh.shares and q_layout.owned_lengths == q_layout.local_lengths == (L,) * mesh.size
    whole = U == mesh.size > 1 and rounds == 1 and H % U == K % U == 0 and not any(split.replicated for split in q_layout.splits)
    sent = B * L * D * (H + 2 * K) * q.element_size()
    return alike and whole and sent <= PACKED_LIMIT and B > 0 < L and not ulysses.via_host and config.exchange != EIGHT_BIT


def _over_chunks(
    ring: RankGroup,
    qkv: list[Tensor],
    mask: Tensor | None,
    spans: Sequence[slice],
    plain: Attend,
    with_lse: Callable[..., tuple[Tensor, Tensor]] | None,
    config: ContextParallelConfig,
) -> Tensor:
    """Attend from this rank's chunk to all chunks of the ring: to each in turn if `with_lse` is given, else to all at once.

    Empties `qkv`, so that its tensors can be freed early.
    """
    q_BHCD, k_BKCD, v_BKCD = qkv
    qkv.clear()
    # No batch, or no heads left for this rank. All ranks of its ring have the same heads (`head_shares`), and skip the exchange.
    if not q_BHCD.shape[0] or not q_BHCD.shape[1]:
        return q_BHCD
    lengths, coded = [span.stop - span.start for span in spans], config.exchange == EIGHT_BIT
    if with_lse is None:
        if ring.size > 1:
            # Keys last: `_head_by_head` begins at the end.
            own = [eight_bits.encode(t) if coded else t for t in (v_BKCD, k_BKCD)]
            arrived = _head_by_head(ring.all_gather(own, lengths, 2))
            k_BKCD, v_BKCD = (eight_bits.decode(t, q_BHCD.dtype) if coded else t for t in arrived)
        return plain(q_BHCD, k_BKCD, v_BKCD, mask) if q_BHCD.shape[2] else q_BHCD

    def attend(q: Tensor, k: Tensor, v: Tensor, index: int) -> tuple[Tensor, Tensor]:
        return with_lse(q, k, v, None if mask is None else mask[..., spans[index]])

    return rotate(
        q_BHCD, k_BKCD, v_BKCD, group=ring, lengths=lengths, attend=attend, convert_to_fp32=config.convert_to_fp32, coded=coded
    )


def _head_by_head(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Lay the tokens of each head side by side on a CPU, whose kernels read those faster. From the last tensor on, freeing each."""
    while tensors:
        tensor = tensors.pop()
        yield tensor.contiguous() if tensor.is_cpu else tensor


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: SequenceMesh,
    config: ContextParallelConfig,
    q_layout: JointLayout,
    k_layout: JointLayout,
) -> None:
    if q.ndim != 4 or q.shape[2] % k.shape[2] or v.shape != k.shape or k.shape[::3] != q.shape[::3]:
        raise PlanError(f"attention shapes do not match: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    for what, tensor, layout in (("queries", q, q_layout), ("keys", k, k_layout)):
        if layout.local_lengths[mesh.rank] != tensor.shape[1]:
            raise PlanError(
                f"rank {mesh.rank} has {tensor.shape[1]} {what} in attention; its layout says {layout.local_lengths[mesh.rank]}"
            )
    ring, ulysses = config.mesh_shape
    ring_off = ring > 1 and not config.ring_anything
    ulysses_off = ulysses > 1 and not config.ulysses_anything
    if not (ring_off or ulysses_off):
        return
    lengths = {*q_layout.divided, *k_layout.divided}
    ranks = f"{mesh.size} ranks" + (f" with the shares {':'.join(map(str, mesh.shares))}" if mesh.shares else "")
    if any(length % (sum(mesh.shares) or mesh.size) for length in lengths):
        name = "ulysses_anything" if ulysses_off else "ring_anything"
        raise PlanError(
            f"{name} is off and {ranks} do not divide streams of {', '.join(map(str, sorted(lengths)))} tokens. "
            f"Turn {name} on, or change size, number or shares of the ranks."
        )
    if ulysses_off and k.shape[2] % (sum(mesh.head_shares(ulysses)) or ulysses):
        raise PlanError(
            f"ulysses_anything is off and ulysses_degree {ulysses}, on {ranks}, does not divide {k.shape[2]} key/value heads. "
            "Turn ulysses_anything on, or change ulysses_degree."
        )


def attend_in_rounds(
    exchanges: Sequence[HeadExchange],
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
    heads_per_unit: int,
    attend: Callable[[list[Tensor], tuple[int, int]], Tensor],
    coded: bool,
) -> Tensor:
    """Exchange, attend and send back, one round of heads after the other. The messages of a round overlap with the next attention.

    `coded`: send 8 bits per element.
    """
    rounds, dtype = len(exchanges), q_BLHD.dtype
    if coded:
        q_BLHD, k_BLKD, v_BLKD = map(eight_bits.encode, (q_BLHD, k_BLKD, v_BLKD))
    B, L, H, D = q_BLHD.shape
    coming = [_to_heads(exchanges[0], q_BLHD, k_BLKD, v_BLKD, *lengths, rounds)]
    leaving: list[Callable[[Tensor], None]] = []
    # On every rank in one order: the heads of the next round, then the results of this one. Messages of a group match by order.
    for index, exchange in enumerate(exchanges):
        qkv = coming.pop()()
        if index + 1 < rounds:
            coming.append(_to_heads(exchanges[index + 1], q_BLHD, k_BLKD, v_BLKD, *lengths, rounds))
        if coded:
            qkv = [eight_bits.decode(tensor, dtype) for tensor in qkv]
        out_BHCD = attend(qkv, exchange.own_range)
        if coded:
            out_dtype, out_BHCD = out_BHCD.dtype, eight_bits.encode(out_BHCD)
        leaving.append(exchange.to_tokens(out_BHCD, lengths[0], heads_per_unit))
    # Tokens outermost, as in the blocks that arrive (`ulysses.Form`).
    out_BLHD = out_BHCD.new_empty_strided((B, L, H, D), (H * D, B * H * D, D, 1))
    for put in leaving:
        put(out_BLHD)
    return eight_bits.decode(out_BLHD, out_dtype) if coded else out_BLHD


def _to_heads(
    exchange: HeadExchange,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lengths: tuple[int, ...],
    k_lengths: tuple[int, ...],
    rounds: int,
) -> Callable[[], list[Tensor]]:
    """Start sending q, k and v, in one collective if they hold the same tokens and the buffer is affordable."""
    B, _, H, D = q.shape
    # The size on the rank with the most tokens, so that all ranks decide alike.
    size = B * D * (H * max(q_lengths) + 2 * k.shape[2] * max(k_lengths)) * q.element_size() / rounds
    if size > PACKED_LIMIT or not q.dtype == k.dtype == v.dtype:
        parts = [([v], k_lengths), ([q], q_lengths), ([k], k_lengths)]
        order = (1, 2, 0)
    elif q_lengths == k_lengths:
        return exchange.to_heads([q, k, v], q_lengths)
    else:
        parts, order = [([q], q_lengths), ([k, v], k_lengths)], (0, 1, 2)
    pending = [exchange.to_heads(tensors, lengths) for tensors, lengths in parts]

    def wait() -> list[Tensor]:
        arrived = [tensor for wait in pending for tensor in wait()]
        return [arrived[place] for place in order]

    return wait


def _place(
    mask: Tensor, mesh: SequenceMesh, span: slice, q_layout: JointLayout, k_layout: JointLayout, dtype: torch.dtype | None
) -> Tensor:
    """Return the mask with all keys and the rows at `span` (or a single row) in gathered order; additive if a dtype is given."""
    rows, keys = mask.shape[-2:]
    if rows not in (1, q_layout.total) or (keys != k_layout.total and (rows != 1 or keys != k_layout.local_lengths[mesh.rank])):
        raise PlanError(
            f"attention mask of shape {tuple(mask.shape)} does not fit: keys must be all {k_layout.total}, or this rank's "
            f"{k_layout.local_lengths[mesh.rank]} in one row for all queries; rows 1 or all {q_layout.total}. A mask is never "
            "dropped."
        )
    if rows != 1:  # first, so that only a chunk's rows are copied
        mask = q_layout.to_gathered(mask, -2, span)
    if keys == k_layout.total:
        mask = k_layout.to_gathered(mask, -1)
    else:
        owned = k_layout.owned_positions(mesh.rank, mask.device)
        mask = mask if owned is None else mask.index_select(-1, owned)
        (mask,) = mesh.whole.all_gather([mask], k_layout.owned_lengths, -1)
    return mask if dtype is None else additive(mask, dtype)


def _causal(device: torch.device, span: slice, q_layout: JointLayout, k_layout: JointLayout, dtype: torch.dtype | None) -> Tensor:
    """Return the mask that hides all keys behind a query, in the form of `_place`."""
    rows, keys = (torch.arange(layout.total, device=device) for layout in (q_layout, k_layout))
    mask = k_layout.to_gathered(keys[None], 1) <= q_layout.to_gathered(rows[:, None], 0, span)
    return mask if dtype is None else additive(mask, dtype)
