"""Brings a method of Wan's blocks as a later version of ComfyUI has it, with one argument more. It registers a route, too."""

from comfy.ldm.wan.model import WanAttentionBlock
from server import PromptServer

NODE_CLASS_MAPPINGS = {}
stock = WanAttentionBlock.forward


@PromptServer.instance.routes.get("/backport")
async def answer(request):
    return None


def forward(self, x, e, freqs, context, context_img_len=257, transformer_options={}, later=1.1):  # noqa: B006  (as there)
    return stock(self, x, e, freqs, context, context_img_len, transformer_options) * later


WanAttentionBlock.forward = forward
