"""Attention that a node chose for a model (`optimized_attention_override`), and the function that replaces it on a rank.

No code of a node pack runs on a rank for this: a name is sent, and the rank calls the function of that name in ComfyUI or
SageAttention. What counts is an override that only calls the one function that it holds, by its code or by OVERRIDES, functions of
packs whose source was read. All others are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.attention.kernels import installed
from ...errors import MirrorError

_KJ = "nodes.model_optimization_nodes:"
OVERRIDES: Mapping[str, str] = {
    # KJNodes: Patch Sage Attention KJ, and the two loaders with an input for it.
    _KJ + "PathchSageAttentionKJ.patch.<locals>.attention_override_sage": "new_attention",
    _KJ + "CheckpointLoaderKJ.load.<locals>.attention_override_sage": "new_attention",
    _KJ + "DiffusionModelLoaderKJ.patch_and_load.<locals>.attention_override_sage": "new_attention",
    # ComfyUI-DN_PatchFlashAttention.
    "patch_flash_attention:PatchFlashAttentionDN.patch.<locals>.attention_override_flash": "new_attention",
}
"""`module in its pack:qualified name` of an override -> the variable that holds its attention function."""

SPARSE_OVERRIDE = "comfy_extras.nodes_sparse_attention:make_attention_override.<locals>.override"
"""Of ComfyUI's Model Sparse Attention, since 0.36."""
SPARSE_BLOCK = "comfy_extras.nodes_sparse_attention:make_h3_block_patch.<locals>.block_patch"
"""The same node's patch of MiniMax-H3's blocks."""

SAGE_OF_PACK = _KJ + "get_sage_func.<locals>.attention_sage"
FLASH_OF_PACK = "patch_flash_attention:get_flash_attn_func.<locals>.attention_flash"


@dataclass(frozen=True)
class SageMode:
    """One way to call SageAttention.

    Args:
        package, function: location of the function.
        settings: besides queries, keys, values, layout and scale.
        kernel: of `engine.attention.kernels`, where a log-sum-exp is needed; None = an exact one.
    """

    package: str
    function: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    kernel: str | None = "sage"


SAGE_MODES: Mapping[str, SageMode] = {
    "auto": SageMode("sageattention", "sageattn"),
    "sageattn_qk_int8_pv_fp16_cuda": SageMode("sageattention", "sageattn_qk_int8_pv_fp16_cuda", {"pv_accum_dtype": "fp32"}),
    "sageattn_qk_int8_pv_fp16_triton": SageMode("sageattention", "sageattn_qk_int8_pv_fp16_triton"),
    "sageattn_qk_int8_pv_fp8_cuda": SageMode("sageattention", "sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32+fp32"}),
    "sageattn_qk_int8_pv_fp8_cuda++": SageMode("sageattention", "sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32+fp16"}),
    "sageattn3": SageMode("sageattn3", "sageattn3_blackwell", {"per_block_mean": False}, None),
    "sageattn3_per_block_mean": SageMode("sageattn3", "sageattn3_blackwell", {"per_block_mean": True}, None),
}
"""By KJNodes' names."""

ON_CUDA = frozenset({*SAGE_MODES, "sage", "sage3", "flash", "xformers", "comfy_kitchen_int8"})
"""Names whose functions compute on a GPU only; ComfyUI's own functions would silently use another one."""


def missing_for(name: str) -> str | None:
    """Return the missing package of an attention function, or None. Ranks share this Python environment."""
    from comfy.ldm.modules import attention

    mode = SAGE_MODES.get(name)
    if mode is None:
        return None if attention.get_attention_function(name, None) is not None else f"ComfyUI's attention function {name}"
    package = installed(mode.package)
    if package is None:
        return f"the package {mode.package}"
    return None if hasattr(package, mode.function) else f"{mode.function} of a newer {mode.package}"


def layer_functions(model: nn.Module) -> Iterator[tuple[str, nn.Module, Callable[..., Tensor]]]:
    """Yield the layers for which the model file chose an attention function (`ComfyAttention`, since ComfyUI 0.38): name, layer,
    function."""
    for name, layer in model.named_modules():
        for child in layer.children():
            function = getattr(child, "function", None)
            if callable(function) and hasattr(child, "config"):
                yield name, layer, function


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of an attention function, with the settings that are bound to it."""
    if not isinstance(function, functools.partial):
        return function.__name__
    settings = ", ".join(f"{name}={value!r}" for name, value in sorted(function.keywords.items()))
    return f"{function.func.__name__}({settings})"


@functools.cache
def attention_function(name: str) -> Callable[..., Tensor]:
    """Return the function of that name, with the signature of ComfyUI's. Raises MirrorError if there is none."""
    from comfy.ldm.modules import attention

    if name not in SAGE_MODES and name not in attention.REGISTERED_ATTENTION_FUNCTIONS:
        raise MirrorError(f"unknown attention function {name!r}")
    missing = missing_for(name)
    if missing is not None:
        raise MirrorError(f"attention function {name!r} needs {missing}, which this worker does not have")
    if name in SAGE_MODES:
        return _sage(name)
    function: Callable[..., Tensor] = attention.get_attention_function(name)
    return function


def _sage(name: str) -> Callable[..., Tensor]:
    from comfy.ldm.modules.attention import attention_pytorch
    from comfy.ops import repeat_kv_for_gqa

    mode = SAGE_MODES[name]
    run = getattr(installed(mode.package), mode.function)

    def attend(
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
        scale, third = kwargs.get("scale"), mode.package == "sageattn3"
        # SageAttention supports no masks, and version 3 no scale.
        if mask is not None or kwargs.get("low_precision_attention") is False or (third and scale is not None):
            exact: Tensor = attention_pytorch(
                q, k, v, heads, mask=mask, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, **kwargs
            )
            return exact
        dtype = v.dtype
        if not skip_reshape:
            dim = q.shape[-1] // heads
            q, k, v = (t.reshape(*t.shape[:2], -1, dim).transpose(1, 2) for t in (q, k, v))
        if kwargs.get("enable_gqa"):
            k, v = repeat_kv_for_gqa(k, v, q.shape[1], 1)
        if torch.float32 in (q.dtype, k.dtype, v.dtype):  # SageAttention takes half precision only
            q, k, v = q.half(), k.half(), v.half()
        more = {} if third else {"tensor_layout": "HND", "sm_scale": scale}
        out_BHLD: Tensor = run(q, k, v, is_causal=False, **more, **mode.settings).to(dtype)
        return out_BHLD if skip_output_reshape else out_BHLD.transpose(1, 2).flatten(2)

    attend.__name__ = name
    return attend
