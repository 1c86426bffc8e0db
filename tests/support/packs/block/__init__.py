"""Wraps a method of Flux' blocks, with settings that a node of it changes."""

import functools

from comfy.ldm.flux.layers import DoubleStreamBlock

SETTINGS = {"flux": {"scale": 0.9}}


def scaled(stock):
    @functools.wraps(stock)
    def forward(self, *args, **kwargs):
        img, txt = stock(self, *args, **kwargs)
        return img * SETTINGS["flux"]["scale"], txt

    return forward


DoubleStreamBlock.forward = scaled(DoubleStreamBlock.forward)


class SetScale:
    """The node."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "scale": ("FLOAT", {})}}

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def run(self, model, scale):
        SETTINGS["flux"]["scale"] = scale
        return (model,)


NODE_CLASS_MAPPINGS = {"SetScale": SetScale}
