"""A text encoder and VAEs of ComfyUI's own classes, small and random, for nodes that encode by themselves."""

from typing import Any

import comfy.ops
import comfy.sd
import comfy.sd1_clip
import comfy.taesd.taehv
import comfy.taesd.taesd
from comfy.supported_models_base import ClipTarget

from .conditioning import Random
from .node import node

TEXT_CONFIG = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2, "projection_dim": 64}
"""64 wide, as the tiny checkpoints have their text."""
PIXELS = 8
"""Width and height that become one item of the latent."""


@node("CLIP")
def TestClip(seed: int = 0) -> Any:
    """A CLIP with the tokenizer of Stable Diffusion and two random layers: 77 tokens, 64 wide."""
    target = ClipTarget(comfy.sd1_clip.SD1Tokenizer, comfy.sd1_clip.SD1ClipModel)
    clip = comfy.sd.CLIP(target, model_options={"clip_l_model_config": TEXT_CONFIG})
    return randomised(clip, clip.cond_stage_model, seed)


@node("VAE")
def TestVae(seed: int = 0, channels: int = 16, video: bool = False, own_tiles: bool = False) -> Any:
    """A tiny autoencoder: of images with `video` off, else of videos, as Wan 2.1 (16 channels) and 2.2 (48) have them.

    That of images encodes by one convolution: some nodes want a megapixel of whatever they get. With `own_tiles` it says that it
    cuts tiles by itself, as those of MiniMax-H3 and SeedVR2 do, which have billions of weights.
    """
    kind = comfy.taesd.taehv.TAEHV if video else comfy.taesd.taesd.TAESD
    vae = comfy.sd.VAE(sd=kind(latent_channels=channels).state_dict())
    if not video:
        vae.first_stage_model.taesd_encoder = comfy.ops.disable_weight_init.Conv2d(3, channels, PIXELS, stride=PIXELS)
    vae.handles_tiling = own_tiles
    return randomised(vae, vae.first_stage_model, seed)


@node("IMAGE", "MASK")
def TestImage(seed: int = 0, width: int = 64, height: int = 64, frames: int = 1) -> tuple[Any, ...]:
    """Random images, one or the frames of a video."""
    random = Random(seed)
    return random(frames, height, width, 3).sigmoid(), (random(frames, height, width) > 0).float()


def randomised(wrapper: Any, model: Any, seed: Any) -> Any:
    """Give the parameters of `model` values of the usual size, the same for the same seed."""
    random = Random(seed)
    for parameter in model.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
        values = random(*parameter.shape) / fan_in**0.5
        parameter.data.copy_(values if parameter.ndim > 1 else 0.1 * values)
    return wrapper
