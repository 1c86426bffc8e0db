"""diffusers' own context parallelism on CPU ranks over gloo.

diffusers 0.42.1 is written for accelerators. What it needs here, all of it patched at run time and nothing in its files:

1. `torch.accelerator.device_count`, by which `enable_parallelism` divides, is 0 without an accelerator. It becomes the world size.
2. `torch.accelerator.current_accelerator`, where the "anything" modes gather sizes, is what torch was built for. It becomes cpu.
3. Ring attention needs a kernel that returns the log-sum-exp, and the `native` backend has none. Only where it would raise for that
   reason, its forward op calls the kernel that `scaled_dot_product_attention` runs on CPU, which returns both: no copy, no extra
   pass over the data, and the same speed as `scaled_dot_product_attention`.

Everything else is diffusers' code as released: its entry point, collectives, copies and merging. Both packages attend with that one
CPU kernel, so a difference comes from what happens around it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch import Tensor

BACKEND = attention_dispatch.AttentionBackendName.NATIVE
_original_forward = attention_dispatch._native_attention_forward_op


def patch() -> None:
    """Make diffusers' context parallelism run on CPU ranks. Call it once the process group exists."""
    world, cpu = dist.get_world_size(), torch.device("cpu")
    torch.accelerator.device_count = lambda: world
    torch.accelerator.current_accelerator = lambda check_available=False: cpu
    attention_dispatch._native_attention_forward_op = _forward_with_lse


def _forward_with_lse(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *arguments: Any, **keywords: Any
) -> Any:
    """The native backend's forward op, for `[batch, tokens, heads, dim]`; with the log-sum-exp where ring attention asks for it."""
    dropout_p, is_causal, scale, enable_gqa, return_lse = arguments
    if not return_lse:
        return _original_forward(ctx, query, key, value, attn_mask, *arguments, **keywords)
    if enable_gqa:
        raise ValueError("grouped heads are not part of this comparison")
    if keywords["_save_ctx"]:  # as the original does
        ctx.save_for_backward(query, key, value)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


@cache
def context_parallel_config(ring: int, ulysses: int, anything: bool = False) -> ContextParallelConfig:
    """diffusers' settings for `ring` x `ulysses` CPU ranks."""
    return ContextParallelConfig(
        ring_degree=ring,
        ulysses_degree=ulysses,
        ring_anything=anything and ring > 1,
        ulysses_anything=anything and ulysses > 1,
        mesh=dist.device_mesh.init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses")),
    )


@cache
def parallel_config(ring: int, ulysses: int, anything: bool = False) -> ParallelConfig:
    """The same, set up as `enable_parallelism` does it, for attention without a model."""
    context_parallel = context_parallel_config(ring, ulysses, anything)
    config = ParallelConfig(context_parallel_config=context_parallel)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=context_parallel.mesh)
    return config
