"""Rank script: the same weights and inputs through diffusers' own context parallelism, ours and one process; rank 0 reports.

What of diffusers' needs an accelerator is replaced. The arithmetic of the sharding stays diffusers' own.
"""

from typing import Any
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
from diffusers.hooks import context_parallel as hooks
from diffusers.models import attention_dispatch
from diffusers_cases import padding, qwen
from diffusers_models import build, forward
from support.ranks import finish, report, start, worst
from torch import Tensor, nn

from cp_runtime import ContextParallelConfig, apply_context_parallel

rank, world, _ = start()

# The one backend of diffusers that takes a mask and also returns the log-sum-exp that ring attention merges by.
RING_BACKEND = "_native_cudnn"


def enable(model: nn.Module, **config: Any) -> nn.Module:
    """Shard `model` with diffusers."""
    if config["ring_degree"] > 1:
        for module in model.modules():  # set_attention_backend would change it for every model of the process
            if hasattr(module, "processor"):
                module.processor._attention_backend = RING_BACKEND
    with mock.patch.object(torch.accelerator, "device_count", dist.get_world_size):  # is 0 here, and diffusers divides by it
        model.enable_parallelism(config=diffusers.ContextParallelConfig(**config))
    return model


def _attention_with_lse(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    **_: Any,
) -> Any:
    """What cuDNN computes: `[B, S, H, D]` in and out, the log-sum-exp as `[B, S, H]`."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -1e9)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)), dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    out = out.transpose(1, 2)
    return (out, lse.transpose(1, 2)) if return_lse else out


def _sizes(size: int, group: dist.ProcessGroup) -> list[int]:
    """The sizes on all ranks."""
    sizes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(sizes, size, group=group)
    return sizes


def _gather_padded(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Gather shards of different sizes, which gloo refuses."""
    sizes = _sizes(tensor.shape[dim], group)
    shape = list(tensor.shape)
    shape[dim] = max(sizes)
    padded = tensor.new_zeros(shape)
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


EVEN = dict(images=((8, 4),), text=8)
UNEVEN = dict(images=((1, 13),), text=5)  # on 4 ranks: 6, 4, 4 and 4 tokens
ULYSSES, RING, UNIFIED = (dict(ring_degree=r, ulysses_degree=u) for r, u in ((1, world), (world, 1), (2, world // 2)))
RUNS = [
    ("ulysses", EVEN, ULYSSES, None),
    ("ring", EVEN, RING, None),
    ("unified", EVEN, UNIFIED, None),
    ("ulysses anything", UNEVEN, dict(ULYSSES, ulysses_anything=True), None),
    ("ring anything", UNEVEN, dict(RING, ring_anything=True), None),
    ("ulysses mask", EVEN, ULYSSES, 3),
    ("ring mask", EVEN, RING, 3),
    ("ulysses anything mask", UNEVEN, dict(ULYSSES, ulysses_anything=True), 3),
    ("unified mask", EVEN, UNIFIED, 3),
]

attention_dispatch._cudnn_attention_forward_op = _attention_with_lse
attention_dispatch.gather_size_by_comm = _sizes
hooks._all_gather_anything = _gather_padded
with torch.inference_mode():
    for name, shape, config, valid in RUNS:
        inputs = qwen(**shape)
        if valid is not None:
            inputs["encoder_hidden_states_mask"] = padding(valid, length=shape["text"])
        model = build("qwen")
        (expected,) = forward(model, inputs)
        std = expected.std().item()
        apply_context_parallel(model, ContextParallelConfig(**config))
        (ours,) = forward(model, inputs)
        result = dict(run=name, std=std, ours=worst((ours - expected).abs().max()) / std, theirs=None, between=None, error=None)
        try:
            (theirs,) = forward(enable(build("qwen"), **config), inputs)
            result.update(theirs=worst((theirs - expected).abs().max()) / std, between=worst((theirs - ours).abs().max()) / std)
        except RuntimeError as error:  # on every rank alike: shapes do not fit
            result["error"] = str(error)
        report(**result)
finish()
