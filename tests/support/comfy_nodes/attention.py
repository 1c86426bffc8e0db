"""Attention overrides as node packs set them: closures over a function, some over others, of the packs' own names."""

from collections.abc import Callable
from typing import Any

import torch
from comfy.ldm.modules import attention
from comfy.model_patcher import ModelPatcher

from .node import node

OPTIMIZED = "optimized_attention_override"
PACKS = "/somewhere/custom_nodes/"


def named(function: Callable[..., Any], module: str, qualname: str) -> Any:
    """The function, as if it stood elsewhere."""
    function.__module__, function.__qualname__ = module, qualname
    return function


def backend(name: str) -> Callable[..., Any]:
    """As ComfyUI sets it from the version on that has Model Attention Backend."""
    optimized_attention = attention.get_attention_function(name)

    def override(_: Any, *args: Any, **kwargs: Any) -> Any:
        return optimized_attention(*args, **kwargs)

    qualname = "ModelPatcher.set_model_optimized_attention.<locals>.optimized_attention_override"
    return named(override, "comfy.model_patcher", qualname)


def per_model(name: str) -> Callable[..., Any]:
    """Past ComfyUI's wrapper, so that nothing asks for an override again."""
    target = attention.get_attention_function(name).__wrapped__

    def override(func: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return override


def sage(mode: str, kernel: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Three closures deep; the mode is in the innermost, as a name and a constant, or as a variable. `kernel`: SageAttention's."""
    kernel = kernel or attention.attention_pytorch
    if mode == "auto":
        sageattn = kernel

        def sage_func(q: Any, k: Any, v: Any) -> Any:
            return sageattn(q, k, v)

    elif mode.startswith("sageattn3"):
        sage_attention, sageattn3_blackwell = mode, kernel

        def sage_func(q: Any, k: Any, v: Any) -> Any:
            return sageattn3_blackwell(q, k, v, per_block_mean=sage_attention == "sageattn3_per_block_mean")

    elif mode == "sageattn_qk_int8_pv_fp16_triton":
        sageattn_qk_int8_pv_fp16_triton = kernel

        def sage_func(q: Any, k: Any, v: Any) -> Any:
            return sageattn_qk_int8_pv_fp16_triton(q, k, v)

    elif mode == "sageattn_qk_int8_pv_fp16_cuda":
        sageattn_qk_int8_pv_fp16_cuda = kernel

        def sage_func(q: Any, k: Any, v: Any) -> Any:
            return sageattn_qk_int8_pv_fp16_cuda(q, k, v, pv_accum_dtype="fp32")

    elif mode == "sageattn_qk_int8_pv_fp8_cuda":
        sageattn_qk_int8_pv_fp8_cuda = kernel

        def sage_func(q: Any, k: Any, v: Any) -> Any:
            return sageattn_qk_int8_pv_fp8_cuda(q, k, v, pv_accum_dtype="fp32+fp32")

    elif mode == "sageattn_qk_int8_pv_fp8_cuda++":
        sageattn_qk_int8_pv_fp8_cuda = kernel

        def sage_func(q: Any, k: Any, v: Any) -> Any:
            return sageattn_qk_int8_pv_fp8_cuda(q, k, v, pv_accum_dtype="fp32+fp16")

    else:  # sums in a way that no version of SageAttention's modes does

        def sage_func(q: Any, k: Any, v: Any) -> Any:
            return kernel(q, k, v, pv_accum_dtype="fp16")

    module = PACKS + "comfyui-kjnodes.nodes.model_optimization_nodes"
    sage_func = torch.compiler.disable()(sage_func)

    def attention_sage(q: Any, k: Any, v: Any, heads: int, **kwargs: Any) -> Any:
        return sage_func(q, k, v)

    new_attention = attention.wrap_attn(named(attention_sage, module, "get_sage_func.<locals>.attention_sage"))

    def override(func: Any, *args: Any, **kwargs: Any) -> Any:
        return new_attention.__wrapped__(*args, **kwargs)

    return named(override, module, "PathchSageAttentionKJ.patch.<locals>.attention_override_sage")


def flash(_: str = "") -> Callable[..., Any]:
    module = PACKS + "DN.patch_flash_attention"

    def attention_flash(*args: Any, **kwargs: Any) -> Any:
        return attention.attention_pytorch(*args, **kwargs)

    new_attention = attention.wrap_attn(named(attention_flash, module, "get_flash_attn_func.<locals>.attention_flash"))

    def override(func: Any, *args: Any, **kwargs: Any) -> Any:
        return new_attention.__wrapped__(*args, **kwargs)

    return named(override, module, "PatchFlashAttentionDN.patch.<locals>.attention_override_flash")


def with_a_condition(name: str) -> Callable[..., Any]:
    """The name of one that is known, and a second thing in it: it need not call that function for every layer."""
    optimized_attention, layers = attention.get_attention_function(name), {0}

    def override(func: Any, *args: Any, **kwargs: Any) -> Any:
        return (optimized_attention if layers else func)(*args, **kwargs)

    return named(override, "comfy.model_patcher", backend("pytorch").__qualname__)


def sparse(_: str) -> Callable[..., Any]:
    """As ComfyUI's Model Sparse Attention, newer than 0.33: it attends to all tokens where its conditions do not hold."""

    def override(func: Any, *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return named(override, "comfy_extras.nodes_sparse_attention", "make_attention_override.<locals>.override")


def sparse_block() -> Callable[..., Any]:
    """What it puts in the place of MiniMax-H3's blocks."""

    def block_patch(args: Any, extra: Any) -> Any:
        return extra["original_block"](args)

    return named(block_patch, "comfy_extras.nodes_sparse_attention", "make_h3_block_patch.<locals>.block_patch")


def registered(name: str) -> Callable[..., Any]:
    """A function of the pack's own that ComfyUI knows by name, in this process."""

    def attend(*args: Any, **kwargs: Any) -> Any:
        return attention.attention_pytorch.__wrapped__(*args, **kwargs)

    if attention.get_attention_function(name, None) is None:
        attention.register_attention_function(name, attend)
    return backend(name)


KINDS: dict[str, Callable[[str], Callable[..., Any]]] = {
    kind.__name__.replace("_", " "): kind for kind in (backend, per_model, sage, flash, with_a_condition, sparse, registered)
}


@node("MODEL", model="MODEL", kind=list(KINDS))
def TestAttention(model: ModelPatcher, kind: str, name: str = "pytorch") -> ModelPatcher:
    """Choose the attention function of a model as a pack of a `kind` does. `name`: of ComfyUI's function, or a mode of `sage`."""
    patched = model.clone()
    patched.model_options["transformer_options"][OPTIMIZED] = KINDS[kind](name)
    return patched
