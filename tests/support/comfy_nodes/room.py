"""A node that needs memory of ComfyUI's device, as a text encoder or a VAE does."""

from __future__ import annotations

from typing import Any

import comfy.model_management as mm


class TestRoom:
    """Have ComfyUI free its device, as it does before it loads something: `more` megabytes beside those that are free now.

    Shows, in megabytes, what is free then.
    """

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"more": ("FLOAT", {"default": 0.0, "max": 1e9})}}

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return float("nan")

    def make(self, more: float) -> dict[str, Any]:
        device = mm.get_torch_device()
        mm.free_memory(mm.get_free_memory(device) + more * 1e6, device)
        return {"ui": {"text": [str(mm.get_free_memory(device) / 1e6)]}}
