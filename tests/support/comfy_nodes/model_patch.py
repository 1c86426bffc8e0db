"""Networks that ComfyUI's model patch nodes put beside a transformer, in the sizes of the tiny models, at random."""

from collections.abc import Callable
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import torch
from comfy.clip_vision import Output
from comfy.ldm.anima.lllite import AnimaLLLite
from comfy.ldm.lumina.controlnet import ZImage_Control
from comfy.ldm.wan.model_multitalk import MultiTalkCrossAttnPatch, MultiTalkGetAttnMapPatch
from comfy.ldm.wan.uni3c import WanUni3CControlnet
from comfy_extras import nodes_model_patch

from .conditioning import Random
from .encoders import randomised
from .node import node

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "operations": comfy.ops.manual_cast}
VISION = (9, 32)  # tokens and width of the image encoder of USO


def _lllite() -> torch.nn.Module:
    """Shapes of a file, from which the network takes its own."""
    names = [f"lllite_dit_blocks_{i}_{kind}" for i in range(2) for kind in ("self_attn_q_proj", "cross_attn_q_proj", "mlp_layer1")]
    shapes = {"conv1.weight": (8, 3, 4, 4), "conv3.weight": (16, 8, 4, 4), "proj.weight": (24, 16, 1, 1), "resblocks.0.x": ()}
    shapes = {f"lllite_conditioning1.{name}": shape for name, shape in shapes.items()}
    shapes |= {f"{name}.down.weight": (8, 144) for name in names} | {f"{name}.cond_to_film.weight": (16, 24) for name in names}
    return AnimaLLLite({name: torch.empty(shape) for name, shape in shapes.items()}, None, **SETTINGS)


def _duration_head() -> torch.nn.Module:
    from comfy.ldm.lightricks.duration_head import DurationHead  # newer than ComfyUI 0.30

    return DurationHead(video_cross_attention_dim=128, audio_cross_attention_dim=48, pooler_hidden_dim=16, mlp_hidden=16)


# One layer: with more than the transformer has, ComfyUI's patch would go on in the next call where it stopped in the last.
KINDS: dict[str, Callable[[], torch.nn.Module]] = {
    "qwen": lambda: nodes_model_patch.QwenImageBlockWiseControlNet(num_layers=2, dim=128, **SETTINGS),
    "z-image": lambda: ZImage_Control(dim=256, n_heads=4, n_kv_heads=4, n_control_layers=1, refiner_control=True, **SETTINGS),
    "z-image first version": lambda: ZImage_Control(dim=256, n_heads=4, n_kv_heads=4, n_control_layers=1, **SETTINGS),
    "uso": lambda: nodes_model_patch.SigLIPMultiFeatProjModel(VISION[0], 4, VISION[1], 256, **SETTINGS),
    "uni3c": lambda: WanUni3CControlnet(
        conv_out_dim=32, dim=192, ffn_dim=128, num_layers=2, time_embed_dim=128, out_proj_dim=128, mid_channels=16, **SETTINGS
    ),
    "lllite": _lllite,
    "multitalk": lambda: nodes_model_patch.MultiTalkModelPatch(
        in_dim=160, out_dim=24, intermediate_dim=8, context_tokens=4, num_layers=2, **SETTINGS
    ),
    "duration head": _duration_head,
}


@node("MODEL_PATCH", "CLIP_VISION_OUTPUT", kind=list(KINDS))
def TestModelPatch(kind: str, seed: int = 0) -> tuple[Any, ...]:
    """A model patch of a kind, and what an image encoder would have given for it."""
    network = KINDS[kind]()
    randomised(network, network, seed)
    vision = Output()
    vision.all_hidden_states = Random(seed)(1, 24, *VISION)
    vision.penultimate_hidden_states = Random(seed + 1)(1, *VISION)
    device = comfy.model_management.get_torch_device()
    return comfy.model_patcher.ModelPatcher(network, load_device=device, offload_device=torch.device("cpu")), vision


@node("MODEL", model="MODEL", model_patch="MODEL_PATCH", latent="LATENT")
def TestMultiTalk(model: Any, model_patch: Any, latent: Any, speakers: int = 1) -> Any:
    """What Wan InfiniteTalk to Video puts into the model, with made-up audio for one speaker or two."""
    frames, height, width = latent["samples"].shape[2:]
    patched, random = model.clone(), Random(3)
    patched.model_options["transformer_options"]["audio_embeds"] = random(1, frames, 4 * speakers, 24)
    patched.set_model_patch(MultiTalkCrossAttnPatch(model_patch, 1.5), "attn2_patch")
    if speakers > 1:
        masks = (random(2, -(-height // 2) * -(-width // 2)) > 0).float()
        patched.set_model_patch(MultiTalkGetAttnMapPatch(masks), "attn1_patch")
    return patched
