"""ComfyUI's own nodes that make or change conditioning and latent: what they add reaches the ranks.

Text encoders, VAEs and CLIP vision are tiny and random (tests/support/comfy_nodes/encoders.py); the nodes are the real ones.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from support import checkpoints
from support.architectures import Flux, Init, Wan
from support.checkpoints import Checkpoint
from support.graphs import NodeSpec, Prompt, flux_prompt, wan_prompt
from support.node_graphs import ALL, IMAGE, MASK, POSITIVE, VIDEO, GraphCase, assert_stock, codec, node, picture, vision


@dataclass(frozen=True, kw_only=True)
class WideFlux(Flux):
    """A Flux with more channels in than out: 32 for Canny and Depth, 96 for Fill."""

    channels: int

    def tensors(self) -> Iterator[Init]:
        for init in super().tensors():
            yield replace(init, shape=(self.hidden, 4 * self.channels)) if init.name == "img_in.weight" else init


@dataclass(frozen=True, kw_only=True)
class ReferenceWan(Wan):
    """A Wan that takes a reference image as a frame of its own: Fun Control of Wan 2.2."""

    def tensors(self) -> Iterator[Init]:
        yield from super().tensors()
        yield Init(name="ref_conv.weight", shape=(self.dim, 16, 2, 2), std=1 / 8)
        yield Init(name="ref_conv.bias", shape=(self.dim,), std=0.1)


MODELS = {
    "flux_canny": WideFlux(hidden=256, channels=32),
    "flux_fill": WideFlux(hidden=256, channels=96),
    "wan_fun_control": Wan(in_dim=48, image_embedding=True),
    "wan22_fun_control": ReferenceWan(in_dim=52),
}


@pytest.fixture(scope="module", autouse=True)
def models(checkpoints_dir):
    for name, architecture in MODELS.items():
        checkpoints.write(name, checkpoints_dir, checkpoint=Checkpoint(architecture=architecture))


# One step: it is about what the model is given.
FLUX = partial(flux_prompt, steps=1, cfg=3.0)
WAN = partial(wan_prompt, steps=1, cfg=3.0)
I2V, I2V_22 = (partial(WAN, ckpt=name) for name in ("wan_i2v", "wan22_i2v"))

ENCODERS = {
    "clip": node("TestClip", seed=1),
    "vae": node("TestVae", seed=2, video=False),
    "image": picture(64, 64),
    "encoded": node("VAEEncode", pixels=IMAGE),
    "second": node("TestConditioning", seed=9, tokens=5, width=64, pooled_width=64),
}
VIDEO_ENCODERS = {
    "vae": node("TestVae", seed=2, video=True),
    "image": picture(64, 64),
    "video": picture(64, 64, 9, seed=5),
    "vision": vision(),
}
SECOND, ENCODED, VISION = ["second", 0], ["encoded", 0], ["vision", 0]
TRACK = json.dumps([[{"x": 10 + i / 4, "y": 20 + i / 8} for i in range(121)]])


def flux(class_type: str, graph: partial[Prompt] = FLUX, before: dict[str, NodeSpec] | None = None, **inputs: Any) -> GraphCase:
    """A node that gives the positive conditioning; `before`: nodes that it takes something from."""
    return GraphCase(graph, ENCODERS | (before or {}) | {"node": node(class_type, **inputs)}, {"positive": ["node", 0]})


def text_and_image(class_type: str, image: str, **inputs: Any) -> GraphCase:
    """A text encoding node that also encodes an image, as reference: of a megapixel, whatever its size."""
    vae = codec(16, 32, 0)  # of which few tokens are left
    return flux(class_type, before={"vae": vae}, vae=["vae", 0], prompt="a red cube", **{image: IMAGE}, **inputs)


def wan(class_type: str, graph: partial[Prompt], **inputs: Any) -> GraphCase:
    """A node that gives both conditionings and the latent."""
    return GraphCase(graph, VIDEO_ENCODERS | {"node": node(class_type, width=64, height=64, length=9, **inputs)}, ALL)


CASES = {
    # text
    "CLIPTextEncode": flux("CLIPTextEncode", text="a red cube"),
    "ConditioningZeroOut": flux("ConditioningZeroOut", conditioning=POSITIVE),
    "ConditioningCombine": flux("ConditioningCombine", conditioning_1=POSITIVE, conditioning_2=SECOND),
    "ConditioningConcat": flux("ConditioningConcat", conditioning_to=POSITIVE, conditioning_from=SECOND),
    "ConditioningAverage": flux(
        "ConditioningAverage", conditioning_to=POSITIVE, conditioning_from=SECOND, conditioning_to_strength=0.6
    ),
    "ConditioningSetTimestepRange": flux(
        "ConditioningCombine",
        partial(FLUX, steps=2),
        {
            "early": node("ConditioningSetTimestepRange", conditioning=POSITIVE, end=0.5),
            "late": node("ConditioningSetTimestepRange", conditioning=SECOND, start=0.5),
        },
        conditioning_1=["early", 0],
        conditioning_2=["late", 0],
    ),
    "FluxGuidance": flux("FluxGuidance", conditioning=POSITIVE, guidance=1.5),
    # areas: calls on parts of the latent, added up
    "ConditioningSetArea": flux(
        "ConditioningCombine",
        partial(FLUX, width=128),
        {"area": node("ConditioningSetArea", conditioning=SECOND, width=64, height=64, x=64)},
        conditioning_1=POSITIVE,
        conditioning_2=["area", 0],
    ),
    "ConditioningSetMask": flux(
        "ConditioningCombine",
        before={"masked": node("ConditioningSetMask", conditioning=SECOND, mask=MASK)},
        conditioning_1=POSITIVE,
        conditioning_2=["masked", 0],
    ),
    # references
    "ReferenceLatent": flux("ReferenceLatent", conditioning=POSITIVE, latent=ENCODED),
    "FluxKontextMultiReferenceLatentMethod": flux(
        "FluxKontextMultiReferenceLatentMethod",
        before={
            "first": node("ReferenceLatent", conditioning=POSITIVE, latent=ENCODED),
            "both": node("ReferenceLatent", conditioning=["first", 0], latent=ENCODED),
        },
        conditioning=["both", 0],
        reference_latents_method="index",
    ),
    "TextEncodeQwenImageEdit": text_and_image("TextEncodeQwenImageEdit", "image"),
    "TextEncodeQwenImageEditPlus": text_and_image("TextEncodeQwenImageEditPlus", "image1"),
    "TextEncodeMageFlowEdit": text_and_image("TextEncodeMageFlowEdit", "images.image_1", negative_prompt="", width=64, height=64),
    "TextEncodeBooguEdit": text_and_image("TextEncodeBooguEdit", "images.image_1", negative_prompt=""),
    "TextEncodeJoyImageEdit": text_and_image("TextEncodeJoyImageEdit", "images.image0"),
    # masks and channels beside the noise
    "SetLatentNoiseMask": replace(flux("SetLatentNoiseMask", samples=ENCODED, mask=MASK), wiring={"latent_image": ["node", 0]}),
    "InpaintModelConditioning": replace(
        flux("InpaintModelConditioning", partial(FLUX, ckpt="flux_fill"), pixels=IMAGE, mask=MASK), wiring=ALL
    ),
    "InstructPixToPixConditioning": replace(
        flux("InstructPixToPixConditioning", partial(FLUX, ckpt="flux_canny"), pixels=IMAGE), wiring=ALL
    ),
    # video
    "WanImageToVideo": wan("WanImageToVideo", I2V, start_image=IMAGE, clip_vision_output=VISION),
    "WanImageToVideo 2.2": wan("WanImageToVideo", I2V_22, start_image=IMAGE),
    "WanFirstLastFrameToVideo": wan("WanFirstLastFrameToVideo", I2V_22, start_image=IMAGE, end_image=IMAGE),
    "WanFunInpaintToVideo": wan("WanFunInpaintToVideo", I2V, start_image=IMAGE, end_image=IMAGE, clip_vision_output=VISION),
    "WanFunControlToVideo": wan(
        "WanFunControlToVideo",
        partial(WAN, ckpt="wan_fun_control"),
        start_image=IMAGE,
        control_video=VIDEO,
        clip_vision_output=VISION,
    ),
    "Wan22FunControlToVideo": wan(
        "Wan22FunControlToVideo", partial(WAN, ckpt="wan22_fun_control"), ref_image=IMAGE, control_video=VIDEO
    ),
    "WanTrackToVideo": wan("WanTrackToVideo", I2V, tracks=TRACK, start_image=IMAGE, clip_vision_output=VISION),
    "WanMoveTrackToVideo": wan("WanMoveTrackToVideo", I2V, start_image=IMAGE, clip_vision_output=VISION),
    "BerniniConditioning": wan(
        "BerniniConditioning", WAN, source_video=VIDEO, ref_max_size=64, **{"reference_images.reference_image_0": IMAGE}
    ),
    "Wan22ImageToVideoLatent": GraphCase(
        partial(WAN, ckpt="wan22_5b", channels=48),
        {
            "vae": node("TestVae", seed=2, channels=48, video=True),
            "image": picture(64, 64),
            "node": node("Wan22ImageToVideoLatent", width=64, height=64, length=9, start_image=IMAGE),
        },
        {"latent_image": ["node", 0]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_latent_equals_the_stock_graph(name, server):
    assert_stock(server, CASES[name], cp={"world_size": 2})
