"""Has a node that replaces a function of ComfyUI's when it runs, and another one that takes that back."""

import comfy.ldm.flux.math
from comfy.ldm.flux import layers

STOCK = comfy.ldm.flux.math.rope


def rope(*args, **kwargs):
    return STOCK(*args, **kwargs) * 0.9


class ReplaceLater:
    """The node."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "back": ("BOOLEAN", {})}}

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def run(self, model, back):
        layers.rope = STOCK if back else rope
        return (model,)


NODE_CLASS_MAPPINGS = {"ReplaceLater": ReplaceLater}
