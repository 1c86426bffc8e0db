"""Patches of other nodes that ranks compute with: code in the transformer (`transformer_options`), and weight patches.

A patch is a function of a node's code, or an object. Ranks get it by value (`shared.objects`): its code by name, its data as it is.
What they may compute on a part of the tokens is listed in MIRRORED. A patch sees its rank's tokens, like the forward; if it
expects anything else, MIRRORED names the adapter.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import comfy.ldm.common_dit
import comfy.lora
import comfy.utils
from comfy.model_patcher import key_param_name_to_key
from torch import Tensor

from ...engine.call import RunningCall
from .modules import full_name
from .weights import is_dynamic

Entry = tuple[Any, ...]
Prepare = Callable[[Any, Tensor], None]
Adapt = Callable[[Any, RunningCall], Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """The way a patch is mirrored.

    Args:
        node: id of the node that makes it, where its code does not tell.
        without: attributes that the workers do not need: None there.
        prepare: called in the UI process before every call, with the patch and the latent: encodes images, which takes a VAE.
        adapt: (patch, the running call) -> function for the forward.
        mixes_batch: it needs all items of a batch; no batch axis.
        by_conditioning: it needs all items of a conditioning, such as one half of CFG.
        unless: classes of transformers whose forward gives it unexpected inputs, once tokens are split.
    """

    node: str = ""
    without: tuple[str, ...] = ()
    prepare: Prepare | None = None
    adapt: Adapt | None = None
    mixes_batch: bool = False
    by_conditioning: bool = False
    unless: tuple[str, ...] = ()


UNLISTED = Patch(by_conditioning=True)
"""A patch that MIRRORED does not have, of a model whose tokens are not split. ComfyUI computes halves of CFG one after the other
where memory is short, so a patch that is right there is right on ranks that have a half each."""


def _on_whole_tokens(stream: str, *names: str) -> Adapt:
    """Run the patch on all tokens on every rank: gather the arguments `names`, and split the output."""

    def adapt(patch: Any, call: RunningCall) -> Callable[..., Any]:
        def adapted(arguments: dict[str, Any]) -> Any:
            if stream not in call.state.lengths:
                return patch(arguments)
            layout = call.state.layout((stream,))
            whole = {n: call.gather(arguments[n], stream, 1) for n in names}
            with call.tokens(on_all=True):
                out = patch({**arguments, **whole})
            if isinstance(out, Tensor):
                return layout.take_local(out, call.state.rank, 1)
            return {k: layout.take_local(v, call.state.rank, 1) if k in names else v for k, v in out.items()}

        return adapted

    return adapt


def _with_local_hint(patch: Any, call: RunningCall) -> Callable[..., Any]:
    """Add the hint for this rank's tokens only."""

    def adapted(arguments: dict[str, Any]) -> Any:
        hint = patch.encoded_image
        start, stop = call.state.layout(("img",)).window(call.state.rank)
        local = copy.copy(patch)
        local.encoded_image = hint[:, start : min(stop, hint.shape[1])]
        return local(arguments)

    return adapted


def _with_local_embedding(patch: Any, call: RunningCall) -> Callable[..., Any]:
    """Show the patch this rank's part of its embedding from before the first block."""
    data = "model_patch_data"

    def localised(options: dict[str, Any]) -> dict[str, Any]:
        state = call.state
        layout = state.layout(("video",))
        local = {k: state.once(data, v, lambda v=v: layout.take_local(v, state.rank, 1)) for k, v in options[data].items()}
        return {**options, data: local}

    def attention(*args: Any, extra_options: dict[str, Any], **kwargs: Any) -> Any:
        return patch(*args, extra_options=localised(extra_options), **kwargs)

    def mlp(arguments: dict[str, Any]) -> Any:
        return patch({**arguments, "transformer_options": localised(arguments["transformer_options"])})

    return attention if "extra_options" in inspect.signature(patch).parameters else mlp


def _encode_qwen_hint(patch: Any, x: Tensor) -> None:
    # The patch encodes its image inside the forward, once it knows the size. Here it runs with a network that adds nothing.
    alone, network = copy.copy(patch), patch.model_patch.model
    alone.model_patch = SimpleNamespace(
        model=SimpleNamespace(
            additional_in_dim=network.additional_in_dim,
            process_input_latent_image=network.process_input_latent_image,
            control_block=lambda img, *_: img,
        )
    )
    alone({"x": x, "img": x.new_zeros(1, 1, 1), "block_index": 0})
    patch.encoded_image, patch.encoded_image_size = alone.encoded_image, alone.encoded_image_size


def _encode_z_image_hint(patch: Any, x: Tensor) -> None:
    # After its last block the patch only encodes its image. The forward passes it whole image patches.
    x = comfy.ldm.common_dit.pad_to_patch_size(x, (2, 2))
    patch({"x": x, "img": x, "txt": x, "block_index": sys.maxsize})


def _encode_render(patch: Any, x: Tensor) -> None:
    x = comfy.ldm.common_dit.pad_to_patch_size(x, (1, 2, 2))
    patch.build_controlnet_input(x, x.dtype, x.shape[0])


_EXTRAS = "comfy_extras."
_MODEL_PATCH = _EXTRAS + "nodes_model_patch:"
_LLLITE = "comfy.ldm.anima.lllite:AnimaLLLite"
_MULTITALK = "comfy.ldm.wan.model_multitalk:MultiTalk"
_IMAGES = ("image", "inpaint_image", "mask", "render_video", "latent_format", "temp_data")
MIRRORED: Mapping[str, Patch] = {
    _EXTRAS + "nodes_slg:SkipLayerGuidanceDiT.execute.<locals>.skip": Patch(),
    _EXTRAS + "nodes_slg:SkipLayerGuidanceDiTSimple.execute.<locals>.skip": Patch(),
    _EXTRAS + "nodes_pag:PerturbedAttentionGuidance.execute.<locals>.perturbed_attention": Patch(),
    _EXTRAS + "nodes_freelunch:FreeU.execute.<locals>.output_block_patch": Patch(),
    _EXTRAS + "nodes_freelunch:FreeU_V2.execute.<locals>.output_block_patch": Patch(),
    _EXTRAS + "nodes_model_downscale:PatchModelAddDownscale.execute.<locals>.input_block_patch": Patch(),
    _EXTRAS + "nodes_model_downscale:PatchModelAddDownscale.execute.<locals>.output_block_patch": Patch(),
    # Krea 2 counts the image's tokens from the start of all tokens.
    _EXTRAS + "nodes_nag:NAGuidance.execute.<locals>.nag_attention_output_patch": Patch(
        mixes_batch=True, unless=("SingleStreamDiT",)
    ),
    _MODEL_PATCH + "UsoStyleProjectorPatch": Patch(node="USOStyleReference", mixes_batch=True),
    _MODEL_PATCH + "DiffSynthCnetPatch": Patch(
        node="QwenImageDiffsynthControlnet", without=_IMAGES, prepare=_encode_qwen_hint, adapt=_with_local_hint, mixes_batch=True
    ),
    # The forward separates text and image between blocks: with this patch, Lumina's plan gathers the blocks' outputs.
    _MODEL_PATCH + "ZImageControlPatch": Patch(
        node="ZImageFunControlnet",
        without=_IMAGES,
        prepare=_encode_z_image_hint,
        mixes_batch=True,
        unless=("NextDiTPixelSpace",),
    ),
    _MODEL_PATCH + "WanUni3CCnetPatch": Patch(
        node="WanUni3CControlnetApply",
        without=_IMAGES,
        prepare=_encode_render,
        adapt=_on_whole_tokens("video", "img"),
        mixes_batch=True,
    ),
    # Adds to what a single layer computes for a token.
    "comfy.weight_adapter.bypass:BypassInjectionManager.create_injections.<locals>.inject_all": Patch(node="LoraLoaderBypass"),
    _LLLITE + "Patch": Patch(node="AnimaLLLiteApply", mixes_batch=True),
    _LLLITE + "AttentionPatch": Patch(node="AnimaLLLiteApply", adapt=_with_local_embedding, mixes_batch=True),
    _LLLITE + "MLPPatch": Patch(node="AnimaLLLiteApply", adapt=_with_local_embedding, mixes_batch=True),
    _MULTITALK + "CrossAttnPatch": Patch(
        node="WanInfiniteTalkToVideo", adapt=_on_whole_tokens("video", "x"), mixes_batch=True
    ),
    _MULTITALK + "GetAttnMapPatch": Patch(
        node="WanInfiniteTalkToVideo", adapt=_on_whole_tokens("video", "x", "q", "k"), mixes_batch=True
    ),
}  # fmt: skip


def map_patches(options: Mapping[str, Any], function: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Apply a function to every patch in `patches` and `patches_replace`, given its name there, in words, and the patch."""
    added, replacing = options.get("patches", {}), options.get("patches_replace", {})
    return {
        "patches": {name: [function(f"patches: {name}", each) for each in patches] for name, patches in added.items()},
        "patches_replace": {
            name: {place: function(f"patches_replace: {name}", each) for place, each in patches.items()}
            for name, patches in replacing.items()
        },
    }


def code_of(patch: Any) -> Any:
    """Return the function that a patch is, or calls with arguments of its own; of another object its class."""
    while isinstance(patch, partial) or hasattr(patch, "__func__"):
        patch = patch.func if isinstance(patch, partial) else patch.__func__
    return patch if isinstance(patch, (FunctionType, BuiltinFunctionType, type)) else type(patch)


def name_of(patch: Any) -> str:
    return full_name(code_of(patch))


def listed(patch: Any) -> Patch | None:
    """Return the entry of a patch in MIRRORED."""
    return None if is_around(patch) else MIRRORED.get(name_of(patch))


def is_around(thing: Any) -> bool:
    """Return whether a function is around another one, whose name it may have."""
    return isinstance(thing, partial) or "__wrapped__" in vars(code_of(thing))


def applied_patches(patcher: Any) -> dict[str, list[Entry]]:
    """Return the patches of a ModelPatcher that ComfyUI puts into weights: not those of modules with weights in modules inside
    them, and with DynamicVRAM not those of modules that do not cast on compute."""
    if not patcher.patches:
        return {}
    dynamic = is_dynamic(patcher.model)
    loaded = (entry[-3:] for entry in patcher._load_list())
    applied = {
        key_param_name_to_key(path, name)
        for path, module, weights in loaded
        for name in weights
        if not dynamic or hasattr(module, "comfy_cast_weights")
    }
    return {name: entries for name, entries in patcher.patches.items() if name in applied}


def changes_shape(patcher: Any, name: str) -> bool:
    """Return whether patches change the shape of a weight, as a LoRA for control images does for the input layer."""
    weight = comfy.utils.get_attr(patcher.model, name)
    return bool(comfy.lora.calculate_shape(patcher.patches.get(name, ()), weight, name) != weight.shape)
