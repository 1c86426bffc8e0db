"""The node classes that ComfyUI's templates put around families of pictures, shapes and sounds, on the family's tiny model: the
latent is the stock graph's. `support.node_graphs` has the stand-ins for encoders."""

import pytest
from support.graphs import Link, NodeSpec
from support.node_graphs import (
    ALL,
    BOTH,
    CHECKPOINT,
    IMAGE,
    IMAGE_ONLY,
    POSITIVE,
    GraphCase,
    assert_stock,
    codec,
    here,
    latent,
    node,
    picture,
    text,
    vision,
)

ZEROED: dict[str, Link] = {"positive": ["node", 0], "negative": ["zero", 0]}
LOW, FRONT, VISION = ["low", 0], ["front", 0], ["vision", 0]
SMOOTH = dict(start_percent=0.0, pattern="single_shift", passes="4", blend="window", strength=1.0)
RADIANCE = [node("ChromaRadianceOptions", start_sigma=1.0, nerf_tile_size=4, force_sequential_txt_ids=True)]
SIDES = {"front": vision(7, 48), "left": vision(7, 48, seed=9)}
OF_FRONT = node("Hunyuan3Dv2Conditioning", clip_vision_output=FRONT)


def zeroed(made: NodeSpec) -> dict[str, NodeSpec]:
    """The node gives the positive conditioning, and the negative one is nothing."""
    return {"node": made, "zero": node("ConditioningZeroOut", conditioning=["node", 0])}


PICTURES = {
    "LotusConditioning": GraphCase(
        "sd2_lotus",
        {"node": node("LotusConditioning")},
        {"conditioning": ["node", 0]},
        {"cfg": 1.0, "node": "SamplerCustomAdvanced"},
    ),
    "unCLIPConditioning": GraphCase(
        "sdxl_unclip",
        {
            "vision": vision(1, 1280),
            "other": vision(1, 1280, seed=9),
            "first": node("unCLIPConditioning", conditioning=POSITIVE, clip_vision_output=VISION, noise_augmentation=0.1),
            "node": node("unCLIPConditioning", conditioning=["first", 0], clip_vision_output=["other", 0], noise_augmentation=0.1),
        },
        {"positive": ["node", 0]},
        loader=CHECKPOINT,
    ),
    "InstructPixToPixConditioning on HiDream-E1": GraphCase(
        "hidream",
        {"vae": codec(16, 8, 0), "pixels": picture(128, 128), "node": node("InstructPixToPixConditioning")},
        ALL,
    ),
    "HiDreamO1ReferenceImages": GraphCase(
        "hidream o1",
        {"image": picture(64, 64), "node": node("HiDreamO1ReferenceImages", **{"images.image_1": IMAGE})},
        BOTH,
        loader=CHECKPOINT,
    ),
    "HiDreamO1PatchSeamSmoothing": GraphCase(
        "hidream o1",
        {"large": latent(3, 128, 128)},
        {"latent_image": ["large", 0]},
        {"model_nodes": [node("HiDreamO1PatchSeamSmoothing", **SMOOTH)]},
        CHECKPOINT,
    ),
    "ChromaRadianceOptions": GraphCase("chroma_radiance", settings={"model_nodes": RADIANCE}),
    "ChromaRadianceOptions behind Apply": GraphCase("chroma_radiance", settings={"after_apply": RADIANCE}),
    "PiDConditioning": GraphCase(
        "pid",
        {"low": latent(4, 8, 8)} | zeroed(node("PiDConditioning", latent=LOW, latent_format="sdxl", degrade_sigma=0.3)),
        ZEROED,
    ),
    "SeedVR2Conditioning": GraphCase(
        "seedvr2 text",
        {"low": latent(16, 5, 8, 10), "node": node("SeedVR2Conditioning", model=["loader", 0], vae_conditioning=LOW)},
        BOTH,
        {"cfg": 1.0},
    ),
}
SHAPES = {
    "Hunyuan3Dv2Conditioning": GraphCase("hunyuan3d_2", SIDES | {"node": OF_FRONT}, BOTH, loader=IMAGE_ONLY),
    "Hunyuan3Dv2ConditioningMultiView": GraphCase(
        "hunyuan3d_2",
        SIDES | {"node": node("Hunyuan3Dv2ConditioningMultiView", front=FRONT, left=["left", 0])},
        BOTH,
        loader=IMAGE_ONLY,
    ),
    "Hunyuan3Dv2Conditioning on 2.1": GraphCase("hunyuan3d_21", SIDES | {"node": OF_FRONT}, BOTH, loader=IMAGE_ONLY),
    # Its latent has 8192 tokens, the tiny model fewer: the sampler takes the family's. That also keeps the preview from decoding,
    # which it survives.
    "TripoSplatConditioning, TripoSplatSamplingPreview": GraphCase(
        "triposplat",
        {
            "splats": node("TestSplats"),
            "vae": codec(12, 16, 0),
            "image": picture(64, 48),
            "vision": vision(13, 48),
            "node": node("TripoSplatConditioning", clip_vision=["vision", 1]),
        },
        BOTH,
        {"model_nodes": [node("TripoSplatSamplingPreview", vae=["splats", 0], octree_level=5, num_gaussians=1024)]},
    ),
}

# --- sound ------------------------------------------------------------------------------------------------------------

SONG = node("TextEncodeAceStepAudio1.5", tags="piano", lyrics="la la", duration=2.0, top_k=0)
LYRICS, LINES = {"tensor": [[*range(9)]], "dtype": "int64"}, {"shape": [1, 9, 48]}
SOUNDS = {
    "TextEncodeAceStepAudio": GraphCase(
        "ace_step",
        {"clip": text(7, 48, conditioning_lyrics=LYRICS)}
        | zeroed(node("TextEncodeAceStepAudio", tags="piano", lyrics="la la", lyrics_strength=0.9)),
        ZEROED,
        loader=CHECKPOINT,
    ),
    "TextEncodeAceStepAudio1.5": GraphCase("ace_step_15", {"clip": text(7, 48, conditioning_lyrics=LINES)} | zeroed(SONG), ZEROED),
    "TextEncodeAceStepAudio1.5, codes": GraphCase(
        "ace_step_15",
        {"clip": text(7, 48, conditioning_lyrics=LINES, audio_codes=[[5, 63999, 1234, 20000]])} | zeroed(SONG),
        ZEROED,
    ),
    "MiniMaxMusic3TextEncode": GraphCase(
        "minimax_music",
        {"clip": text(12, 256)} | zeroed(node("MiniMaxMusic3TextEncode", caption="piano", lyrics="la la", max_duration=2.0)),
        ZEROED,
        since="0.33.0",
    ),
}

# --- checkpoints ------------------------------------------------------------------------------------------------------

LOADED = {
    f"Load Checkpoint, {name}": GraphCase(name, loader=CHECKPOINT, matters=False)
    for name in ("sd15", "sdxl", "sdxl_refiner", "sd3", "flux", "lumina2", "stable_audio_open", "stable_audio_3")
}
CASES = here(PICTURES | SHAPES | SOUNDS | LOADED)


@pytest.mark.parametrize(("name", "served"), [(name, case.served) for name, case in CASES.items()], ids=CASES)
def test_latent_equals_the_stock_graph(name, served, server, family_checkpoints, as_checkpoint):
    if CASES[name].loader != "UNETLoader":
        as_checkpoint(served)
    assert_stock(server, CASES[name])
