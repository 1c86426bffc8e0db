"""ControlNets in memory, of the shapes that ComfyUI's loaders make, with weights at random."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import comfy.cldm.cldm
import comfy.cldm.dit_embedder
import comfy.cldm.mmdit
import comfy.ldm.flux.controlnet
import comfy.ldm.hydit.controlnet
import comfy.ldm.qwen_image.controlnet
import comfy.memory_management
import comfy.ops
import comfy.samplers
import torch
from comfy.controlnet import ControlNet, ControlNetSD35, StrengthType
from torch import Tensor

from .node import node

SCALE = 0.2


def wide(image: Tensor) -> Tensor:
    """A hint with the channels of a latent."""
    return image.repeat(1, 6, 1, 1)[:, :16]


def wide_frame(image: Tensor) -> Tensor:
    return wide(image).unsqueeze(2)


def narrow(image: Tensor) -> Tensor:
    return image.repeat(1, 2, 1, 1)[:, :4]


LATENT: dict[str, Any] = {"compression_ratio": 1}
FLUX = comfy.ldm.flux.controlnet.ControlNetFlux
KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "unet": (comfy.cldm.cldm.ControlNet, {"hint_channels": 3}, {}),
    "flux image": (FLUX, {}, {"extra_conds": ["y", "guidance"]}),
    "flux latent": (
        FLUX,
        {"latent_input": True, "num_union_modes": 3, "control_latent_channels": 16},
        {**LATENT, "extra_conds": ["y", "guidance"], "preprocess_image": wide},
    ),
    "flux inpaint": (
        FLUX,
        {"latent_input": True, "control_latent_channels": 17},
        {**LATENT, "extra_conds": ["y", "guidance"], "preprocess_image": wide, "concat_mask": True},
    ),
    "sd3": (comfy.cldm.mmdit.ControlNet, {"num_blocks": 2, "control_latent_channels": 16}, {**LATENT, "preprocess_image": wide}),
    "sd35": (comfy.cldm.dit_embedder.ControlNetEmbedder, {"double_y_emb": False}, {**LATENT, "preprocess_image": wide}),
    "sd35 double": (comfy.cldm.dit_embedder.ControlNetEmbedder, {"double_y_emb": True}, {**LATENT, "preprocess_image": wide}),
    "qwen": (
        comfy.ldm.qwen_image.controlnet.QwenImageControlNetModel,
        {},
        {**LATENT, "extra_conds": [], "preprocess_image": wide_frame},
    ),
    "hydit": (
        comfy.ldm.hydit.controlnet.HunYuanControlNet,
        {},
        {
            **LATENT,
            "extra_conds": [
                "text_embedding_mask",
                "encoder_hidden_states_t5",
                "text_embedding_mask_t5",
                "image_meta_size",
                "style",
            ],
            "preprocess_image": narrow,
        },
    ),
}


class AdvancedControlNet(ControlNet):
    def copy(self) -> Any:
        copied = super().copy()
        copied.__class__ = AdvancedControlNet
        return copied


@contextmanager
def without_lazy_weights() -> Iterator[None]:
    """Have layers get their weights when they are made, which they do not where DynamicVRAM loads them."""
    enabled, comfy.memory_management.aimdo_enabled = comfy.memory_management.aimdo_enabled, False
    try:
        yield
    finally:
        comfy.memory_management.aimdo_enabled = enabled


@node("CONTROL_NET", model="MODEL", kind=list(KINDS))
def TestControlNet(
    model: Any,
    kind: str,
    seed: int = 0,
    linear: bool = False,
    pooling: bool = False,
    blocks: int = 0,
    hooked: bool = False,
    unused: int = 0,
    subclass: bool = False,
    changed: str = "",
) -> Any:
    """A ControlNet for a model, as large as it. `linear`: its strength grows with the depth; `pooling`: one value per channel;
    `blocks`: of Flux's with two streams, and no others; `hooked`: a hook changes what a block gives;
    `unused`: MB of weights besides; `subclass`: of ComfyUI's class, as node packs have them;
    `changed`: how a node has changed it, a function of `CHANGES`."""
    cls, own, settings = KINDS[kind]
    config = {**model.model.model_config.unet_config, **own}
    for name in ("image_model", "disable_unet_model_creation", "dtype", *(["out_channels"] if kind == "unet" else [])):
        config.pop(name, None)
    if kind.startswith("sd35"):
        heads = {"num_attention_heads": config["depth"], "attention_head_dim": 64, "main_model_double": config["depth"]}
        config = {**own, **heads, "img_size": None, "patch_size": 2, "in_chans": 16, "adm_in_channels": config["adm_in_channels"]}
        config["num_layers"] = 1
    if blocks:
        config |= {"depth": blocks, "depth_single_blocks": 0}
    made = partial(cls, **config, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
    with without_lazy_weights():
        template = made()
    draw = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(weight.shape, generator=draw) * (SCALE if weight.ndim < 2 else weight[0].numel() ** -0.5)
        for name, weight in template.state_dict().items()
    }
    network = made()
    network.load_state_dict(weights)
    if kind == "hydit":  # which always has 19 blocks: as many as the model has skipped connections
        count = model.model.diffusion_model.depth // 2 - 1
        network.blocks, network.after_proj_list = network.blocks[:count], network.after_proj_list[:count]
    network.requires_grad_(False)
    if unused:
        network.unused = torch.nn.Parameter(torch.ones(unused << 18), requires_grad=False)
    if hooked:
        network.controlnet_blocks[0].register_forward_hook(lambda module, args, out: out * 0.5)
    strength = StrengthType.LINEAR_UP if linear else StrengthType.CONSTANT
    own_class = ControlNetSD35 if kind.startswith("sd35") else AdvancedControlNet if subclass else ControlNet
    made = own_class(
        network.eval(), load_device=model.load_device, strength_type=strength, global_average_pooling=pooling, **settings
    )
    if changed:
        CHANGES[changed](made)
    return made


def _patched(control: Any) -> None:
    key, weight = next((name, weight) for name, weight in control.control_model.named_parameters() if weight.ndim == 2)
    control.control_model_wrapped.add_patches({key: (torch.ones_like(weight),)}, 0.5)


def _merged(control: Any) -> None:
    """Merges in its own way, and so do its copies."""
    copied = control.copy

    def copy() -> Any:
        new = copied()
        merge = type(new).control_merge

        def halved(*args: Any, **kwargs: Any) -> Any:
            out = merge(new, *args, **kwargs)
            return {kind: [None if each is None else each * 0.5 for each in residuals] for kind, residuals in out.items()}

        new.control_merge = halved
        return new

    control.copy = copy


class Rolled(torch.nn.Module):
    """Mixes tokens."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out.roll(1, dims=1)


def _rolled(control: Any) -> None:
    control.control_model.controlnet_blocks[0] = Rolled(control.control_model.controlnet_blocks[0])


CHANGES: dict[str, Callable[[Any], None]] = {"patched": _patched, "merged": _merged, "rolled": _rolled}


@node("CONTROL_NET", control_net="CONTROL_NET")
def TestScaledNetwork(control_net: Any, scale: float = 1.0) -> Any:
    """Scales a ControlNet's weights in place, those that it was loaded with."""
    network = control_net.control_model
    loaded = LOADED.setdefault(network, [weight.clone() for weight in network.parameters()])
    for weight, before in zip(network.parameters(), loaded, strict=True):
        weight.data.copy_(before * scale)
    return control_net


LOADED: WeakKeyDictionary[Any, list[Tensor]] = WeakKeyDictionary()


def _input_in_place(args: dict[str, Any]) -> None:
    args["input"].mul_(0.7)
    args["c"]["c_crossattn"].mul_(0.5)


def _reads(args: dict[str, Any]) -> None:
    assert any(each is not None for residuals in args["c"]["control"].values() for each in residuals)


def _copies(args: dict[str, Any]) -> None:
    args["c"]["control"] = deepcopy(copy(args["c"]["control"]))


def _adds_to(args: dict[str, Any]) -> None:
    residuals = args["c"]["control"]
    residuals |= {"output": []}


def _compares(args: dict[str, Any]) -> None:
    if not (args["c"]["control"] != {}):  # noqa: SIM202  (another method than `==`)
        del args["c"]["control"]


LOOKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "input_in_place": _input_in_place, "reads": _reads, "copies": _copies, "adds_to": _adds_to, "compares": _compares
}  # fmt: skip


@node("MODEL", again=True, model="MODEL", kind=list(LOOKS))
def TestAroundControl(model: Any, kind: str) -> Any:
    """A wrapper around every call that does something with what it gets."""

    def call(apply_model: Any, args: dict[str, Any]) -> Any:
        LOOKS[kind](args)
        return apply_model(args["input"], args["timestep"], **args["c"])

    patched = model.clone()
    patched.set_model_unet_function_wrapper(call)
    return patched


@node("MODEL", again=True, model="MODEL")
def TestCopiedControl(model: Any, deep: bool = False) -> Any:
    """Calls the model once more behind guidance, with copies of the ControlNets, as nodes for regions do."""

    def after(args: dict[str, Any]) -> Any:
        conds = deepcopy(args["cond"]) if deep else [dict(each) for each in args["cond"]]
        for each in (each for each in conds if "control" in each):
            control = each["control"]
            each["control"] = again = control.copy().set_previous_controlnet(control.previous_controlnet)
            again.strength = 0.5 * control.strength
            again.pre_run(args["model"], args["model"].model_sampling.percent_to_sigma)
        (out,) = comfy.samplers.calc_cond_batch(args["model"], [conds], args["input"], args["sigma"], args["model_options"])
        return args["denoised"] + 0.3 * (args["cond_denoised"] - out)

    patched = model.clone()
    patched.set_model_sampler_post_cfg_function(after)
    return patched


@node("MODEL", again=True, model="MODEL")
def TestScaledControl(model: Any) -> Any:
    """Halves the residuals of every call, as nodes for soft weights do."""

    def call(apply_model: Any, args: dict[str, Any]) -> Any:
        control = args["c"].get("control")
        if control is not None:
            halved = {kind: [None if each is None else each * 0.5 for each in residuals] for kind, residuals in control.items()}
            args["c"]["control"] = halved
        return apply_model(args["input"], args["timestep"], **args["c"])

    patched = model.clone()
    patched.set_model_unet_function_wrapper(call)
    return patched
