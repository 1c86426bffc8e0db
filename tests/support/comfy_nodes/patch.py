"""One node that patches a model in every way other node packs do, to test what is refused and what is not."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy
import torch
from comfy import model_management as mm
from comfy.cli_args import args
from comfy.ldm.modules.attention import attention_pytorch
from comfy.ldm.wan.model import WanModel
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_api.torch_helpers import set_torch_compile_wrapper

from .attention import sparse_block
from .node import kinds, node

FACTOR = 0.9
"""Every patch scales something by this factor, so that one that is silently skipped shows in the output."""

KEY = "test_patch"


def _attn1_patch(model: ModelPatcher) -> None:
    # Flux calls it with q, k and v and takes a dict; Wan calls it with one dict and takes a tensor.
    def patch(first: Any, *args: Any, **kwargs: Any) -> Any:
        return first["x"] * FACTOR if isinstance(first, dict) else {"q": first * FACTOR}

    model.set_model_attn1_patch(patch)


def _patches_replace(model: ModelPatcher) -> None:
    def replace(args: Any, extra: Any) -> Any:
        out = extra["original_block"](args)
        return {**out, "img": out["img"] * FACTOR}

    model.set_model_patch_replace(replace, "dit", "double_block", 0)


def _attention_override(model: ModelPatcher) -> None:
    def override(func: Any, *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs) * FACTOR

    model.model_options["transformer_options"]["optimized_attention_override"] = override


def _model_function_wrapper(model: ModelPatcher) -> None:
    def wrapper(apply_model: Any, args: Any) -> Any:
        return apply_model(args["input"], args["timestep"], **args["c"]) * FACTOR

    model.set_model_unet_function_wrapper(wrapper)


def _scaled(executor: Any, *args: Any, **kwargs: Any) -> Any:
    return executor(*args, **kwargs) * FACTOR


def _unchanged(executor: Any, *args: Any, **kwargs: Any) -> Any:
    return executor(*args, **kwargs)


def _scaled_image(args: Any) -> Any:
    return {**args, "img": args["img"] * FACTOR}


def _weight_function(model: ModelPatcher) -> None:
    name = "img_in" if hasattr(model.model.diffusion_model, "img_in") else "head.head"
    model.add_weight_wrapper(f"diffusion_model.{name}.weight", lambda weight: weight * FACTOR)


def _on_load(model: ModelPatcher) -> None:
    def callback(patcher: Any, *args: Any) -> Any:
        patcher.model.diffusion_model.img_in.bias.data.mul_(FACTOR)

    model.add_callback_with_key(CallbacksMP.ON_LOAD, KEY, callback)


def _changed_weight(model: ModelPatcher) -> None:
    bias = model.model.diffusion_model.img_in.bias.data
    bias.copy_(bias.float() * FACTOR)  # torch multiplies no float8


class OtherPatcher(ModelPatcher):
    """A patcher class of another pack, as GGUF loaders have."""


def _for_a_call(model: ModelPatcher) -> None:
    # As step caches do: another forward while the transformer runs, and the model's own when anybody looks.
    transformer = model.model.diffusion_model
    method = "forward_orig" if hasattr(transformer, "double_blocks") else "forward"
    own = getattr(type(transformer), method)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs) * FACTOR

    replaced = patch.multiple(transformer, **{method: forward.__get__(transformer)})

    def wrapper(apply_model: Any, args: Any) -> Any:
        with replaced:
            return apply_model(args["input"], args["timestep"], **args["c"])

    model.set_model_unet_function_wrapper(wrapper)


def _innermost_for_a_call(model: ModelPatcher) -> None:
    # As block caches do that copy the innermost forward: it is another one while the model is called.
    transformer = model.model.diffusion_model
    method = "_forward" if hasattr(type(transformer), "_forward") else "forward"
    own = getattr(type(transformer), method)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(transformer, *args, **kwargs) * FACTOR

    def wrapper(apply_model: Any, args: Any) -> Any:
        with patch.object(transformer, method, forward):
            return apply_model(args["input"], args["timestep"], **args["c"])

    model.set_model_unet_function_wrapper(wrapper)


def _forward_of_the_class(model: ModelPatcher) -> None:
    # As a node does that has something of its own called in the place of the transformer, and that runs the class's code.
    class Around(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(type(transformer), method)(transformer, *args, **kwargs) * FACTOR

    transformer = model.model.diffusion_model
    method = "_forward" if hasattr(type(transformer), "_forward") else "forward"

    def wrapper(apply_model: Any, args: Any) -> Any:
        around = Around()
        around.dtype = transformer.dtype
        with patch.dict(model.model._modules, diffusion_model=around):
            return apply_model(args["input"], args["timestep"], **args["c"])

    model.set_model_unet_function_wrapper(wrapper)


def _object_argument(model: ModelPatcher) -> None:
    def wrapper(apply_model: Any, args: Any) -> Any:
        return apply_model(args["input"], args["timestep"], **args["c"], own=object())

    model.set_model_unet_function_wrapper(wrapper)


def _layer_alone(model: ModelPatcher) -> None:
    # As step caches do that look at what the first layers make of a call before they decide.
    def wrapper(apply_model: Any, args: Any) -> Any:
        layer = next(module for module in model.model.diffusion_model.modules() if isinstance(module, torch.nn.Linear))
        probe = layer(args["input"].new_ones(1, layer.in_features))
        return apply_model(args["input"], args["timestep"], **args["c"]) * (1 + probe.std().tanh())

    model.set_model_unet_function_wrapper(wrapper)


def _other_class(model: ModelPatcher) -> None:
    # For good, because all clones share the transformer.
    transformer = model.model.diffusion_model
    if type(transformer).__name__ != "OtherTransformer":
        transformer.__class__ = type("OtherTransformer", (type(transformer),), {})


def _class(model: ModelPatcher) -> None:
    # For good and for all models of the class, as packs do at import.
    _replace(WanModel, "forward_orig")


def _class_of_a_patch(model: ModelPatcher) -> None:
    (made,) = model.model_options["transformer_options"]["patches"]["post_input"]
    _replace(type(made), "__call__")


def _class_of_a_network(model: ModelPatcher) -> None:
    (made,) = model.model_options["transformer_options"]["patches"]["post_input"]
    _replace(type(made.model_patch.model), "forward")


_replaced: list[tuple[type, str, Callable[..., Any]]] = []


def _replace(cls: Any, method: str) -> None:
    stock = getattr(cls, method)

    def foreign(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock(self, *args, **kwargs)
        return out * FACTOR if isinstance(out, torch.Tensor) else out

    setattr(cls, method, foreign)
    _replaced.append((cls, method, stock))


def _class_restored(model: ModelPatcher) -> None:
    while _replaced:
        setattr(*_replaced.pop())


def _module(model: ModelPatcher) -> None:
    head = model.model.diffusion_model.head

    class Scaled(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * FACTOR

    head.head = torch.nn.Sequential(head.head, Scaled())


def _chosen_attention(model: ModelPatcher) -> None:
    # As ComfyUI 0.38 makes it of an entry in a model file, but with a function of this pack.
    def attention_of_a_pack(*args: Any, **kwargs: Any) -> Any:
        return attention_pytorch(*args, **kwargs)

    chosen: Any = torch.nn.Module()
    chosen.config, chosen.function = {"attention": "of a pack"}, attention_of_a_pack
    model.model.diffusion_model.blocks[0].self_attn.comfy_attention = chosen


def _compile_eager(model: ModelPatcher) -> None:
    # As packs do whose nodes have more inputs than ComfyUI's own: blocks where they know their name, else the whole model.
    transformer = model.model.diffusion_model
    named = [name for name in ("blocks", "double_blocks") if hasattr(transformer, name)]
    keys = [f"diffusion_model.{named[0]}.{number}" for number in range(2)] if named else ["diffusion_model"]
    set_torch_compile_wrapper(model=model, backend="eager", dynamic=True, keys=keys)


def _compile_aot(model: ModelPatcher) -> None:
    # The graphs of inductor, whose code takes minutes to compile.
    set_torch_compile_wrapper(model=model, backend="aot_eager")


def _recorded(model: ModelPatcher) -> None:
    # As ComfyUI 0.34 records what MiniMax-H3's forward allocates around its `_forward`: it fails where another process computes.
    vars(args).setdefault("disable_comfy_compiler", False)

    def wrapper(executor: Any, *given: Any, **kwargs: Any) -> Any:
        if not args.disable_comfy_compiler:
            raise RuntimeError("aimdo memory compile error")
        return executor(*given, **kwargs)

    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, wrapper)


def _clone_to_sample(model: ModelPatcher, change: Callable[[ModelPatcher], Any] = lambda clone: None) -> None:
    # As KJNodes' Model Memory Usage Factor Override: what is loaded is a clone that nothing refers to afterwards.
    def wrapper(executor: Any, patcher: ModelPatcher, *args: Any, **kwargs: Any) -> Any:
        clone = patcher.clone()
        change(clone)
        return executor(clone, *args, **kwargs)

    model.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, wrapper)


def changed_input(model: ModelPatcher) -> None:
    name = "diffusion_model.img_in.weight"
    shape = model.model_state_dict(name)[name].shape  # not what is in it: that may be patched already
    model.add_patches({name: ("diff", (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * (1 - FACTOR),))})


def _unload_while_sampling(model: ModelPatcher) -> None:
    # As a node that needs the memory in the middle of a run.
    def wrapper(apply_model: Any, args: Any) -> Any:
        mm.unload_all_models()
        return apply_model(args["input"], args["timestep"], **args["c"])

    model.set_model_unet_function_wrapper(wrapper)


def _reads_embedder(model: ModelPatcher) -> None:
    # As a ControlNet for SD3.5 takes the weights of the model that it is used with.
    def wrapper(apply_model: Any, args: Any) -> Any:
        weight = model.model.diffusion_model.x_embedder.proj.weight.float()
        return apply_model(args["input"], args["timestep"], **args["c"]) * weight.std()

    model.set_model_unet_function_wrapper(wrapper)


KINDS: dict[str, Callable[[ModelPatcher], Any]] = {
    **kinds(globals(), ModelPatcher),
    "attn1_output_patch": lambda model: model.set_model_attn1_output_patch(lambda attn, extra_options: attn * FACTOR),
    "attn2_patch": lambda model: model.set_model_attn2_patch(lambda args: args["x"] * FACTOR),
    "post_input": lambda model: model.set_model_post_input_patch(_scaled_image),
    "double_block": lambda model: model.set_model_double_block_patch(_scaled_image),
    "diffusion_model_wrapper": lambda model: model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, _scaled),
    "apply_model_wrapper": lambda model: model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, _scaled),
    "post_cfg": lambda model: model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * FACTOR),
    "subclass": lambda model: setattr(model, "__class__", OtherPatcher),
    "multigpu": lambda model: model.set_additional_models("multigpu", [model.clone()]),
    "unknown_option": lambda model: model.model_options["transformer_options"].update(test_option=object()),
    "compile_option": lambda model: set_torch_compile_wrapper(model=model, backend="inductor", options={"cpp.cxx": "/tmp/evil"}),
    "compile_alone": lambda model: model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "torch.compile", _unchanged),
    "changed_clone_to_sample": lambda model: _clone_to_sample(model, changed_input),
    "sparse_block": lambda model: model.set_model_patch_replace(sparse_block(), "dit", "double_block", 0),
}


class _Number:
    """A number in a way that no message carries: stock computes with it."""

    def __rmul__(self, other: Any) -> Any:
        return other * 2.0

    def get(self, name: str, default: Any) -> Any:
        return 2.0 if name.startswith("scale") else default


OPTIONS: dict[str, Callable[[], Any]] = {
    "alone": _Number,
    "inside": lambda: {"scale_x": _Number(), "scale_y": _Number()},
    "set": lambda: {1, "two", object()},
    "bytes": lambda: {"own": b"123"},
    "number": lambda: [numpy.int64(1), numpy.bool_(True)],
}


@node("MODEL", model="MODEL", kind=list(OPTIONS), read="BOOLEAN")
def TestOptions(model: Any, kind: str, read: bool) -> Any:
    """Put something into the options of the transformer: where Flux reads it, or where nothing does."""
    patched = model.clone()
    patched.model_options["transformer_options"]["rope_options" if read else "own"] = OPTIONS[kind]()
    return patched


@node("MODEL", model="MODEL", kind=list(KINDS))
def TestPatch(model: Any, kind: str) -> Any:
    """Patch a clone of the model, in the way `kind` names.

    Above the denoise call: `model_function_wrapper`, `apply_model_wrapper`, `post_cfg`. Around it: `diffusion_model_wrapper`.
    Inside: all others; Wan calls `attn2_patch` and `double_block`, Flux `attn1_output_patch` and `post_input`. `subclass` and
    `multigpu` make the model look as other loaders and MultiGPU CFG Split leave it. No model reads `unknown_option`.
    """
    patched = model.clone()
    KINDS[kind](patched)
    return patched
