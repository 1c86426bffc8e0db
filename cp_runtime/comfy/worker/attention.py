"""ComfyUI's attention override: sends planned self-attention through the ranks, leaves all other attention alone.

The user's attention backend stays in force where no log-sum-exp is needed: it arrives as the function to call. Where one is
needed (ring attention, alltoall), the kernel of the same name is taken if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...engine.call import RunningCall

KERNEL_OF = {"attention_sage": "sage", "attention_flash": "flash_attn"}
# These add a boolean mask to the scores as 0 and 1. Other kernels hide keys; a ring must do as the user's backend does.
ADD_BOOLEAN_MASKS = ("attention_sub_quad", "attention_split")


def attention_override(call: RunningCall) -> Callable[..., Tensor]:
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
        if call.attention_is_local:
            return func(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs)

        def attend(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None) -> Tensor:
            return func(
                q_BHSD, k_BKSD, v_BKSD, q_BHSD.shape[1], mask=mask, attn_precision=attn_precision,
                skip_reshape=True, skip_output_reshape=True, **kwargs,
            )  # fmt: skip

        if skip_reshape:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        else:
            head_dim = q.shape[-1] // heads
            q, k, v = (t.reshape(*t.shape[:2], -1, head_dim) for t in (q, k, v))  # SD3 leaves v `[B, L, heads, D]`
        if mask is not None and mask.ndim == 3:  # ComfyUI: [batch, rows, keys]
            mask = call.state.once("heads", mask, partial(mask.unsqueeze, 1))
        backend = getattr(func, "__name__", "")
        if mask is not None and mask.dtype == torch.bool and backend in ADD_BOOLEAN_MASKS:
            mask = call.state.once("numbers", mask, partial(mask.to, q.dtype))
        out_BLHD = call.attend(q, k, v, mask=mask, scale=kwargs.get("scale"), attend=attend, kernel=KERNEL_OF.get(backend))
        return out_BLHD.transpose(1, 2) if skip_output_reshape else out_BLHD.flatten(2)

    return override
