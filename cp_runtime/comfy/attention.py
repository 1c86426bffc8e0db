"""ComfyUI's attention override: sends planned self-attention through the ranks, leaves all other attention alone.

The user's attention backend stays in force: it arrives as the function to call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..attention.ulysses import ulysses_attention
from ..errors import PlanError
from ..hooks import AppliedPlan
from ..plan import CallState
from ..sharding import JointLayout


def attention_override(applied: AppliedPlan, *, anything: bool = True) -> Callable[..., Tensor]:
    """Return a function for `transformer_options["optimized_attention_override"]`.

    It has the signature of ComfyUI's attention functions: q, k, v are `[B, L, heads * D]`, or `[B, heads, L, D]` with
    `skip_reshape`; the output is `[B, L, heads * D]`, or `[B, heads, L, D]` with `skip_output_reshape`.
    """

    def override(
        func: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if not applied.attention:
            return func(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs)
        state = applied.state
        layout = state.layout(applied.attention)

        def attend(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None) -> Tensor:
            return func(
                q_BHSD, k_BKSD, v_BKSD, q_BHSD.shape[1], mask=mask, attn_precision=attn_precision,
                skip_reshape=True, skip_output_reshape=True, **kwargs,
            )  # fmt: skip

        if skip_reshape:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        else:
            head_dim = q.shape[-1] // heads
            q, k, v = (t.unflatten(-1, (-1, head_dim)) for t in (q, k, v))
        out_BLHD = ulysses_attention(
            q, k, v,
            layout=layout,
            group=applied.group,
            attend=attend,
            mask=None if mask is None else gathered_mask(state, applied.attention, layout, mask),
            anything=anything,
        )  # fmt: skip
        return out_BLHD.transpose(1, 2) if skip_output_reshape else out_BLHD.flatten(2)

    return override


def gathered_mask(state: CallState, streams: tuple[str, ...], layout: JointLayout, mask: Tensor) -> Tensor:
    """Bring a mask into gathered order.

    Args:
        mask: `[..., 1 or S, S]` over all tokens in joint order; or a key mask over this rank's tokens, which the module
            built from a planned `key_mask` argument and which is then built for all tokens from that argument.

    Raises:
        PlanError: for any other layout. A mask is never dropped.
    """
    keys, rows = mask.shape[-1], mask.shape[-2]
    if keys == layout.total and rows in (1, layout.total):
        return state.once("mask", mask, lambda: _reorder(layout, mask, rows))
    if keys == layout.local_lengths[state.rank] and rows == 1 and state.key_masks:
        source = next(iter(state.key_masks.values()))
        return state.once("key mask", source, lambda: _joint_key_mask(state, streams, layout, mask))
    raise PlanError(
        f"attention mask of shape {tuple(mask.shape)} is neither over all {layout.total} tokens nor a planned key mask "
        f"of this rank's {layout.local_lengths[state.rank]}"
    )


def _reorder(layout: JointLayout, mask: Tensor, rows: int) -> Tensor:
    order = layout.gathered_order.to(mask.device)
    mask = mask.index_select(-1, order)
    return mask.index_select(-2, order) if rows == layout.total > 1 else mask


def _joint_key_mask(state: CallState, streams: tuple[str, ...], layout: JointLayout, local: Tensor) -> Tensor:
    batch = max(source.shape[0] for source in state.key_masks.values())
    joint = local.new_zeros((batch, 1, layout.total))
    offset = 0
    for name, length in zip(streams, layout.lengths, strict=True):
        if name in state.key_masks:
            joint[:, 0, offset : offset + length] = state.key_masks[name]
        offset += length
    return _reorder(layout, joint, 1)
