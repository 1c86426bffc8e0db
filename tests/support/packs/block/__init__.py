"""Wraps a method of Flux' blocks."""

import functools

from comfy.ldm.flux.layers import DoubleStreamBlock

NODE_CLASS_MAPPINGS = {}


def scaled(stock):
    @functools.wraps(stock)
    def forward(self, *args, **kwargs):
        img, txt = stock(self, *args, **kwargs)
        return img * 0.9, txt

    return forward


DoubleStreamBlock.forward = scaled(DoubleStreamBlock.forward)
