"""Latents of any shape, empty or at random, with or without a noise mask."""

import json
from typing import Any

import torch
from comfy.nested_tensor import NestedTensor

from .conditioning import Random
from .node import node


@node("LATENT", noise_mask=["none", "first_frame", "left", "gradient"])
def TestLatent(
    batch: int = 1, channels: int = 16, frames: int = 0, height: int = 8, width: int = 8, seed: int = 0, noise: float = 0.0,
    noise_mask: str = "none", shapes: str = "",
) -> dict[str, Any]:  # fmt: skip
    """A latent `[batch, channels, height, width]`, or with `frames` `[batch, channels, frames, height, width]`.

    Sizes are in latent pixels. `noise` is the standard deviation of its content. `noise_mask`: `first_frame` keeps the
    first frame as it is (per-frame timesteps in Wan 2.2 5B), `left` keeps the left half of every frame (inpainting),
    `gradient` keeps less and less from left to right (differential diffusion). `shapes` is a JSON list of shapes without
    batch, in place of the sizes; several make a nested latent, as of video and audio.
    """
    if shapes:
        random = Random(seed)
        parts = [random(batch, *shape) * noise for shape in json.loads(shapes)]
        return {"samples": parts[0] if len(parts) == 1 else NestedTensor(parts)}
    extent = ((frames,) if frames else ()) + (height, width)
    latent = {"samples": Random(seed)(batch, channels, *extent) * noise}
    if noise_mask != "none":
        mask = torch.ones(batch, 1, *extent)
        if noise_mask == "first_frame":
            mask[:, :, :1] = 0.0
        elif noise_mask == "gradient":
            mask *= torch.linspace(0.0, 1.0, width)
        else:
            mask[..., : width // 2] = 0.0
        latent["noise_mask"] = mask
    return latent


@node("LATENT", samples="LATENT")
def TestLatentPart(samples: Any, index: int = 0) -> dict[str, Any]:
    """One tensor of a nested latent."""
    return {"samples": samples["samples"].unbind()[index]}


@node("LATENT", image="IMAGE")
def TestPicture(image: Any) -> dict[str, Any]:
    """An image as a latent, as it is, which Save Latent keeps in full precision."""
    return {"samples": image}
