"""A small Flux that draws pages of handwritten digits, and this node pack for it: text encoder and VAE of the benchmarks.

`digits.safetensors` are its weights, made by `train.py`, `reader.safetensors` is what `reader.py` reads pages with.
"""

from __future__ import annotations

from typing import Any

import torch

from . import page


class DigitsPrompt:
    """A table in place of a text encoder."""

    CATEGORY = "digits"
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "encode"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return what ComfyUI asks a node for."""
        tooltip = "A digit for each of the 8 rows; ? or nothing for any. Each line is a page of the batch."
        return {"required": {"text": ("STRING", {"default": "31412718", "multiline": True, "tooltip": tooltip})}}

    def encode(self, text: str) -> tuple[list[Any]]:
        """Return the conditioning: one item per line."""
        rows = torch.stack([page.classes(line) for line in text.splitlines() or [""]])
        return ([[page.encode(rows), {}]],)


class DigitsDecode:
    """Pixels in another order in place of a VAE."""

    CATEGORY = "digits"
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "decode"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return what ComfyUI asks a node for."""
        return {"required": {"samples": ("LATENT",)}}

    def decode(self, samples: dict[str, Any]) -> tuple[torch.Tensor]:
        """Return the pictures, [B, 256, 256, 3]."""
        return (page.from_latent(samples["samples"])[..., None].expand(-1, -1, -1, 3),)


NODE_CLASS_MAPPINGS = {"DigitsPrompt": DigitsPrompt, "DigitsDecode": DigitsDecode}
NODE_DISPLAY_NAME_MAPPINGS = {"DigitsPrompt": "Digits Prompt", "DigitsDecode": "Digits Decode"}
