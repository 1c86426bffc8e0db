"""Latents of any shape, empty or at random, with or without a noise mask."""

from __future__ import annotations

import json
from typing import Any

import torch
from comfy.nested_tensor import NestedTensor

from .conditioning import Random


class TestLatent:
    """A latent `[batch, channels, height, width]`, or with `frames` `[batch, channels, frames, height, width]`.

    Sizes are in latent pixels. `noise` is the standard deviation of its content. `noise_mask`: `first_frame` keeps the
    first frame as it is (per-frame timesteps in Wan 2.2 5B), `left` keeps the left half of every frame (inpainting),
    `gradient` keeps less and less from left to right (differential diffusion). `shapes` is a JSON list of shapes without
    batch, in place of the sizes; several make a nested latent, as of video and audio.
    """

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        size = {"default": 8, "min": 1, "max": 4096}
        return {
            "required": {"batch": ("INT", {"default": 1, "min": 1, "max": 64})},
            "optional": {
                "channels": ("INT", {"default": 16, "min": 1, "max": 1024}),
                "frames": ("INT", {"default": 0, "min": 0, "max": 1024}),
                "height": ("INT", size),
                "width": ("INT", size),
                "seed": ("INT", {"default": 0}),
                "noise": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 10.0}),
                "noise_mask": (["none", "first_frame", "left", "gradient"],),
                "shapes": ("STRING", {"default": ""}),
            },
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(
        self,
        batch: int,
        channels: int = 16,
        frames: int = 0,
        height: int = 8,
        width: int = 8,
        seed: int = 0,
        noise: float = 0.0,
        noise_mask: Any = "none",
        shapes: str = "",
    ) -> tuple[Any, ...]:
        if shapes:
            random = Random(seed)
            parts = [random(batch, *shape) * noise for shape in json.loads(shapes)]
            return ({"samples": parts[0] if len(parts) == 1 else NestedTensor(parts)},)
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
        return (latent,)


class TestLatentPart:
    """One tensor of a nested latent."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"samples": ("LATENT",), "index": ("INT", {"default": 0, "min": 0, "max": 8})}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "take"
    CATEGORY = "test"

    def take(self, samples: Any, index: int) -> tuple[Any, ...]:
        return ({"samples": samples["samples"].unbind()[index]},)


class TestPicture:
    """An image as a latent, as it is, which Save Latent keeps in full precision."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image": ("IMAGE",)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "take"
    CATEGORY = "test"

    def take(self, image: Any) -> tuple[Any, ...]:
        return ({"samples": image},)
