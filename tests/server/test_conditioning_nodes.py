"""ComfyUI's own nodes that make or change conditioning and latent: what they add reaches the ranks.

Text encoders, VAEs and CLIP vision are tiny and random (tests/support/comfy_nodes/encoders.py); the nodes are the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from support import checkpoints
from support.checkpoints import Checkpoint, Flux, Init, Wan
from support.graphs import Link, NodeSpec, Prompt, flux_prompt, wan_prompt

TOLERANCE = 2e-4
CP = {"world_size": 2}

POSITIVE, NEGATIVE, LATENT = ["positive", 0], ["negative", 0], ["latent", 0]
PAIR = {"positive": POSITIVE, "negative": NEGATIVE}


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
FILL = partial(FLUX, ckpt="flux_fill")
WAN = partial(wan_prompt, steps=1, cfg=3.0)
I2V = partial(WAN, ckpt="wan_i2v")
I2V_22 = partial(WAN, ckpt="wan22_i2v")

CLIP: NodeSpec = ("TestClip", {"seed": 1})
VAE: NodeSpec = ("TestVae", {"seed": 2, "channels": 16, "video": False})
VIDEO_VAE: NodeSpec = ("TestVae", {"seed": 2, "channels": 16, "video": True})
VISION: NodeSpec = ("TestClipVision", {"seed": 3})
IMAGE: NodeSpec = ("TestImage", {"seed": 4, "width": 64, "height": 64, "frames": 1})
VIDEO: NodeSpec = ("TestImage", {"seed": 5, "width": 64, "height": 64, "frames": 9})


@dataclass(frozen=True)
class Case:
    """Nodes beside the graph, and what the sampler takes from them.

    Args:
        nodes: by id; `node` is the one that the case is about.
        wiring: inputs of the sampler.
    """

    graph: partial[Prompt]
    nodes: dict[str, NodeSpec]
    wiring: dict[str, Link] = field(default_factory=lambda: {"positive": ["node", 0]})


def changed(class_type: str, **inputs: Any) -> dict[str, NodeSpec]:
    """One node that changes the positive conditioning."""
    return {"node": (class_type, {"conditioning": POSITIVE, **inputs})}


def of_latent(
    class_type: str, graph: partial[Prompt], vae: NodeSpec = VAE, others: dict[str, NodeSpec] | None = None, **inputs: Any
):
    """A node that gives both conditionings and the latent."""
    node = (class_type, {**PAIR, "vae": ["vae", 0], **inputs})
    wiring = {"positive": ["node", 0], "negative": ["node", 1], "latent_image": ["node", 2]}
    return Case(graph, {"vae": vae, "image": IMAGE, "video": VIDEO, "vision": VISION, **(others or {}), "node": node}, wiring)


def wan_node(class_type: str, graph: partial[Prompt], *, length: int = 9, **inputs: Any) -> Case:
    size = {"width": 64, "height": 64, "length": length, "batch_size": 1}
    return of_latent(class_type, graph, VIDEO_VAE, **size, **inputs)


START = {"start_image": ["image", 0]}
END = {"end_image": ["image", 0]}
CONTROL = {"control_video": ["video", 0]}
SEEN = {"clip_vision_output": ["vision", 0]}
LATENT_OF_IMAGE: dict[str, NodeSpec] = {
    "vae": VAE,
    "image": IMAGE,
    "encoded": ("VAEEncode", {"pixels": ["image", 0], "vae": ["vae", 0]}),
}
SECOND: dict[str, NodeSpec] = {"second": ("TestConditioning", {"seed": 9, "tokens": 5, "width": 64, "pooled_width": 64})}
TRACK = json.dumps([[{"x": 10 + i / 4, "y": 20 + i / 8} for i in range(121)]])


def text_and_image(class_type: str, *images: str, **inputs: Any) -> Case:
    """A text encoding node that also encodes an image, as reference: of a megapixel, whatever its size."""
    vae = ("TestCodec", {"seed": 2, "channels": 16, "space": 32, "time": 0})  # of which few tokens are left
    pictures = {name: ["image", 0] for name in images}
    node = (class_type, {"clip": ["clip", 0], "vae": ["vae", 0], "prompt": "a red cube", **pictures, **inputs})
    return Case(FLUX, {"clip": CLIP, "vae": vae, "image": IMAGE, "node": node})


CASES = {
    # text
    "CLIPTextEncode": Case(FLUX, {"clip": CLIP, "node": ("CLIPTextEncode", {"clip": ["clip", 0], "text": "a red cube"})}),
    "ConditioningZeroOut": Case(FLUX, changed("ConditioningZeroOut")),
    "ConditioningCombine": Case(
        FLUX, SECOND | {"node": ("ConditioningCombine", {"conditioning_1": POSITIVE, "conditioning_2": ["second", 0]})}
    ),
    "ConditioningConcat": Case(
        FLUX, SECOND | {"node": ("ConditioningConcat", {"conditioning_to": POSITIVE, "conditioning_from": ["second", 0]})}
    ),
    "ConditioningAverage": Case(
        FLUX,
        SECOND
        | {
            "node": (
                "ConditioningAverage",
                {"conditioning_to": POSITIVE, "conditioning_from": ["second", 0], "conditioning_to_strength": 0.6},
            )
        },
    ),
    "ConditioningSetTimestepRange": Case(
        partial(FLUX, steps=2),
        SECOND
        | {
            "early": ("ConditioningSetTimestepRange", {"conditioning": POSITIVE, "start": 0.0, "end": 0.5}),
            "late": ("ConditioningSetTimestepRange", {"conditioning": ["second", 0], "start": 0.5, "end": 1.0}),
            "node": ("ConditioningCombine", {"conditioning_1": ["early", 0], "conditioning_2": ["late", 0]}),
        },
    ),
    "FluxGuidance": Case(FLUX, changed("FluxGuidance", guidance=1.5)),
    # areas: calls on parts of the latent, added up
    "ConditioningSetArea": Case(
        partial(FLUX, width=128),
        SECOND
        | {
            "area": (
                "ConditioningSetArea",
                {"conditioning": ["second", 0], "width": 64, "height": 64, "x": 64, "y": 0, "strength": 1.0},
            ),
            "node": ("ConditioningCombine", {"conditioning_1": POSITIVE, "conditioning_2": ["area", 0]}),
        },
    ),
    "ConditioningSetMask": Case(
        FLUX,
        SECOND
        | {
            "image": IMAGE,
            "masked": (
                "ConditioningSetMask",
                {"conditioning": ["second", 0], "mask": ["image", 1], "strength": 1.0, "set_cond_area": "default"},
            ),
            "node": ("ConditioningCombine", {"conditioning_1": POSITIVE, "conditioning_2": ["masked", 0]}),
        },
    ),
    # references
    "ReferenceLatent": Case(FLUX, LATENT_OF_IMAGE | changed("ReferenceLatent", latent=["encoded", 0])),
    "FluxKontextMultiReferenceLatentMethod": Case(
        FLUX,
        LATENT_OF_IMAGE
        | {
            "first": ("ReferenceLatent", {"conditioning": POSITIVE, "latent": ["encoded", 0]}),
            "second": ("ReferenceLatent", {"conditioning": ["first", 0], "latent": ["encoded", 0]}),
        }
        | changed("FluxKontextMultiReferenceLatentMethod", conditioning=["second", 0], reference_latents_method="index"),
    ),
    "TextEncodeQwenImageEdit": text_and_image("TextEncodeQwenImageEdit", "image"),
    "TextEncodeQwenImageEditPlus": text_and_image("TextEncodeQwenImageEditPlus", "image1"),
    "TextEncodeMageFlowEdit": text_and_image(
        "TextEncodeMageFlowEdit", "images.image_1", negative_prompt="", width=64, height=64, batch_size=1
    ),
    "TextEncodeBooguEdit": text_and_image("TextEncodeBooguEdit", "images.image_1", negative_prompt=""),
    "TextEncodeJoyImageEdit": text_and_image("TextEncodeJoyImageEdit", "images.image0"),
    # masks and channels beside the noise
    "SetLatentNoiseMask": Case(
        FLUX,
        LATENT_OF_IMAGE | {"node": ("SetLatentNoiseMask", {"samples": ["encoded", 0], "mask": ["image", 1]})},
        {"latent_image": ["node", 0]},
    ),
    "InpaintModelConditioning": of_latent(
        "InpaintModelConditioning", FILL, pixels=["image", 0], mask=["image", 1], noise_mask=True
    ),
    "InstructPixToPixConditioning": of_latent(
        "InstructPixToPixConditioning", partial(FLUX, ckpt="flux_canny"), pixels=["image", 0]
    ),
    # video
    "WanImageToVideo": wan_node("WanImageToVideo", I2V, **START, **SEEN),
    "WanImageToVideo 2.2": wan_node("WanImageToVideo", I2V_22, **START),
    "WanFirstLastFrameToVideo": wan_node("WanFirstLastFrameToVideo", I2V_22, **START, **END),
    "WanFunInpaintToVideo": wan_node("WanFunInpaintToVideo", I2V, **START, **END, **SEEN),
    "WanFunControlToVideo": wan_node("WanFunControlToVideo", partial(WAN, ckpt="wan_fun_control"), **START, **CONTROL, **SEEN),
    "Wan22FunControlToVideo": wan_node(
        "Wan22FunControlToVideo", partial(WAN, ckpt="wan22_fun_control"), ref_image=["image", 0], **CONTROL
    ),
    "WanTrackToVideo": wan_node("WanTrackToVideo", I2V, tracks=TRACK, temperature=220.0, topk=2, **START, **SEEN),
    "WanMoveTrackToVideo": wan_node("WanMoveTrackToVideo", I2V, strength=1.0, **START, **SEEN),
    "BerniniConditioning": wan_node(
        "BerniniConditioning",
        WAN,
        source_video=["video", 0],
        ref_max_size=64,
        **{"reference_images.reference_image_0": ["image", 0]},
    ),
    "Wan22ImageToVideoLatent": Case(
        partial(WAN, ckpt="wan22_5b", channels=48),
        {
            "vae": ("TestVae", {"seed": 2, "channels": 48, "video": True}),
            "image": IMAGE,
            "node": (
                "Wan22ImageToVideoLatent",
                {"vae": ["vae", 0], "width": 64, "height": 64, "length": 9, "batch_size": 1, **START},
            ),
        },
        {"latent_image": ["node", 0]},
    ),
}


def sampled(case: Case, cp: dict[str, Any] | None = None) -> Prompt:
    prompt = case.graph(cp=cp, others=case.nodes)
    prompt["sampler"]["inputs"].update(case.wiring)
    return prompt


@pytest.mark.parametrize("name", CASES)
def test_latent_equals_the_stock_graph(name, server):
    case = CASES[name]
    expected = server.sample(sampled(case), timeout=300)
    out = server.sample(sampled(case, CP), timeout=300)
    assert expected.std() > 1e-2
    assert (out - expected).abs().max() <= TOLERANCE * expected.std()
    plain = server.sample_once(case.graph(), timeout=300)
    assert plain.shape != expected.shape or (plain - expected).abs().max() > 1e-2 * plain.std()
