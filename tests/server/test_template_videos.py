"""The node classes that ComfyUI's templates put around families of videos, on the family's tiny model: the latent is the stock
graph's. `support.node_graphs` has the stand-ins for encoders."""

from dataclasses import replace
from typing import Any

import pytest
from support.graphs import Link, NodeSpec, Prompt
from support.node_graphs import (
    ALL,
    CHECKPOINT,
    IMAGE,
    IMAGE_ONLY,
    LATENT,
    MASK,
    MASKS,
    VIDEO,
    GraphCase,
    assert_stock,
    codec,
    here,
    latent,
    node,
    picture,
    sound,
    text,
    vision,
)

VISION = ["vision", 0]

# --- Wan --------------------------------------------------------------------------------------------------------------

SPEECH, VOICE, MUSIC, PAIR, MOTION = ["speech", 2], ["voice", 2], ["music", 2], ["pair", 0], ["motion", 0]


def wan(name: str, served: str, *, width: int = 80, length: int = 9, **inputs: Any) -> GraphCase:
    """A node, which the name begins with, that gives both conditionings and the latent."""
    size = {"width": width, "height": 64, "length": length}
    nodes = {
        "vae": codec(16),
        "image": picture(width, 64),
        "pair": picture(width, 64, 2),
        "video": picture(width, 64, 9, seed=5),
        "motion": picture(width, 64, 73),
        "vision": vision(),
        "other_vision": vision(seed=9),
        "camera": node("WanCameraEmbedding", camera_pose="Zoom In", **size),
        "speech": sound(features=(25, 400, 32)),
        "voice": sound(features=(33, 60, 1280)),
        "music": sound(feature=(1, 40, 35)),
        "earlier": latent(16, 19, 8, width // 8),
        "motion_text": node("TestConditioning", seed=9, tokens=6, width=48),
    }
    return GraphCase(served, nodes | {"node": node(name.partition(",")[0], **size, **inputs)}, ALL)


SPOKEN = {"audio_encoder_output": SPEECH, "control_video": VIDEO, "ref_image": IMAGE}
POSED = {
    "pose_video": VIDEO, "pose_video_mask": VIDEO, "replacement_mode": True, "pose_strength": 0.9, "reference_image": PAIR,
    "reference_image_mask": PAIR, "clip_vision_output": VISION, "previous_frame_count": 5, "previous_frames": VIDEO,
}  # fmt: skip
DANCING = {"audio_encoder_output": MUSIC, "start_image": IMAGE}
WAN = {
    name: wan(name, served, **inputs)
    for name, served, inputs in (
        ("WanVaceToVideo", "wan_vace", dict(strength=0.8, control_video=VIDEO, control_masks=MASKS, reference_image=IMAGE)),
        ("WanVaceToVideo, text alone", "wan_vace", {}),
        ("WanCameraImageToVideo", "wan_camera", dict(camera_conditions=["camera", 0], start_image=IMAGE)),
        ("WanSoundImageToVideo", "wan_s2v", {**SPOKEN, "ref_motion": MOTION}),
        # Its size is that of the video before.
        ("WanSoundImageToVideoExtend", "wan_s2v", {**SPOKEN, "video_latent": ["earlier", 0]}),
        ("WanHuMoImageToVideo", "humo", dict(audio_encoder_output=VOICE, ref_image=IMAGE)),
        ("WanHuMoImageToVideo, silent", "humo", {}),
        ("WanSCAILToVideo", "scail_2", {**POSED, "width": 64}),
        ("WanDancerVideo", "wan_dancer", {**DANCING, "width": 64, "clip_vision_output": VISION, "clip_vision_output_ref": VISION}),
        ("WanDancerVideo, mask", "wan_dancer", {**DANCING, "width": 64, "start_image": VIDEO, "mask": MASKS}),
    )
}
WAN["WanPhantomSubjectToVideo"] = replace(
    wan("WanPhantomSubjectToVideo", "wan_phantom", images=PAIR),
    wiring={"positive": ["node", 0], "negative": ["node", 2], "latent_image": ["node", 3]},
)


def posed(settings: dict[str, Any], **inputs: Any) -> GraphCase:
    """A figure that moves as in a video."""
    pose = dict(pose_video=VIDEO, positive_pose=["motion_text", 0], clip_vision_output_pose=["other_vision", 0], pose_strength=0.9)
    reference = dict(reference_image=IMAGE, clip_vision_output=VISION, reference_image_strength=0.8)
    case = wan("WanAnimate2ToVideo", "wan_animate2", **pose, **reference, **inputs)
    return replace(case, settings=settings, since="0.33.0")


# Three frames of the latent, one of them shared.
WINDOWS = dict(context_length=3, context_overlap=1, context_schedule="standard_static", dim=2, freenoise=True)
WINDOWS |= dict(cond_retain_index_list="0", causal_window_fix=True)
ANIMATED = [node("ModelSamplingSD3", shift=5.0), node("WanAnimate2Cache", device="cpu")]
ANIMATE_2 = {
    "WanAnimate2ToVideo": posed({}),
    "WanAnimate2ToVideo, for half of the steps": posed({"steps": 2}, pose_end_percent=0.5),
    "WanAnimate2Cache": posed({"steps": 2, "model_nodes": ANIMATED}),
    "WanAnimate2Cache behind Apply": posed({"steps": 2, "after_apply": ANIMATED}),
    # Without the cache: ComfyUI 0.33 fails where windows are of different lengths.
    "ContextWindowsManual on Wan-Animate 2": posed({"model_nodes": [node("ContextWindowsManual", **WINDOWS)]}, length=25),
}

# --- LTX --------------------------------------------------------------------------------------------------------------

LTX: dict[str, NodeSpec] = {
    "vae": codec(128, 32, 8),
    "image": picture(128, 128),
    "video": picture(128, 128, 9, seed=5),
    "empty": node("EmptyLTXVLatentVideo", width=128, height=128, length=17),
    "frames": node("LTXVConditioning", frame_rate=24.0),
}
FRAMES = {"positive": ["frames", 0], "negative": ["frames", 1]}
WITH_SOUND: dict[str, Link] = {**FRAMES, "latent_image": ["joint", 0]}


def with_sound(video: Link, **nodes: NodeSpec) -> dict[str, NodeSpec]:
    concat = node("LTXVConcatAVLatent", video_latent=video, audio_latent=["sound", 0])
    return {**LTX, **nodes, "sound": latent(8, 10, 16, noise=0.0), "joint": concat}


def guide(before: list[Link], image: str, **inputs: Any) -> NodeSpec:
    positive, negative, video = before
    return node("LTXVAddGuide", positive=positive, negative=negative, latent=video, image=[image, 0], **inputs)


INPLACE = node("LTXVImgToVideoInplace", strength=0.8, latent=["empty", 0])
GUIDES = with_sound(
    ["second", 2],
    first=guide([*FRAMES.values(), ["empty", 0]], "video", strength=0.7),
    second=guide([["first", 0], ["first", 1], ["first", 2]], "image", frame_idx=-1, attention_mask=MASK),
)
GUIDED: dict[str, Link] = {"positive": ["second", 0], "negative": ["second", 1], "latent_image": ["joint", 0]}


def two_stages(prompt: Prompt) -> None:
    """The first stage's video goes on without its guides, but with its first frame given; its sound goes on as it is."""
    add = {
        "apart": node("LTXVSeparateAVLatent", av_latent=["sampler", 0]),
        "cropped": node("LTXVCropGuides", positive=["second", 0], negative=["second", 1], latent=["apart", 0]),
        "given": node("LTXVImgToVideoInplace", strength=0.8, latent=["cropped", 2]),
        "again": node("LTXVConcatAVLatent", video_latent=["given", 0], audio_latent=["apart", 1]),
    }
    prompt |= {name: {"class_type": cls, "inputs": inputs} for name, (cls, inputs) in add.items()}
    conds = {"positive": ["cropped", 0], "negative": ["cropped", 1], "latent_image": ["again", 0], "denoise": 0.6}
    prompt["sampler_2"] = {"class_type": "KSampler", "inputs": {**prompt["sampler"]["inputs"], **conds}}
    for index in range(2):
        prompt[f"part_{index}"]["inputs"]["samples"] = ["sampler_2", 0]


VOICED: dict[str, Link] = {"positive": ["model_0", 1], "negative": ["model_0", 2], "latent_image": ["joint", 0]}
REFERENCE_AUDIO = node("LTXVReferenceAudio", **FRAMES, reference_audio=["voice", 0], audio_vae=["voice", 1])
LTXV = {
    "LTXVConditioning": GraphCase("ltxv", LTX, FRAMES, loader=CHECKPOINT, matters=False),
    "LTXVImgToVideo": GraphCase(
        "ltxv",
        LTX | {"node": node("LTXVImgToVideo", **FRAMES, width=128, height=128, length=17, strength=0.9)},
        ALL,
        loader=CHECKPOINT,
    ),
    "LTX-2, text": GraphCase("ltx2", with_sound(["empty", 0]), WITH_SOUND, loader=CHECKPOINT),
    "LTXVImgToVideoInplace": GraphCase("ltx2", with_sound(["given", 0], given=INPLACE), WITH_SOUND, loader=CHECKPOINT),
    "LTXVAddGuide": GraphCase("ltx2", GUIDES, GUIDED, loader=CHECKPOINT),
    "LTXVCropGuides, two stages": GraphCase("ltx2", GUIDES, GUIDED, loader=CHECKPOINT, change=two_stages),
    **{
        f"LTXVReferenceAudio{where}": GraphCase(
            "ltx2", with_sound(["empty", 0], voice=sound(latent=(1, 8, 4, 16))), VOICED, {place: [REFERENCE_AUDIO]}, CHECKPOINT
        )
        for where, place in (("", "model_nodes"), (" behind Apply", "after_apply"))
    },
}


def dual_cfg(prompt: Prompt) -> None:
    inputs = {name: link for name, link in prompt["guider"]["inputs"].items() if name != "cfg"}
    prompt["guider"] = {"class_type": "LTXVDualCFGGuider", "inputs": {**inputs, "video_cfg": 3.0, "audio_cfg": 7.0}}


def of_predicted_length(prompt: Prompt) -> None:
    inputs = {"positive": ["frames", 0], "duration_head": ["head", 0], "frame_rate": 24.0, "min_seconds": 0.5, "max_seconds": 2.0}
    inputs["model"] = prompt["sampler"]["inputs"]["model"]
    prompt["duration"] = {"class_type": "LTXVDurationPredictor", "inputs": inputs}
    prompt["empty"]["inputs"]["length"] = ["duration", 0]


def ltx_25(nodes: dict[str, NodeSpec], wiring: dict[str, Link] = WITH_SOUND, **case: Any) -> GraphCase:
    return GraphCase("ltx2.5", nodes, wiring, since="0.33.0", **case)


GUIDANCE = [node("LTXVSpatioTemporalGuidance", scale=1.5, blocks="1"), node("LTXVModalityGuidance", modality_scale=3.0)]
LTX_25 = {
    "LTXVDualCFGGuider": ltx_25(with_sound(["empty", 0]), settings={"node": "SamplerCustomAdvanced"}, change=dual_cfg),
    "LTXVAddGuide on LTX 2.5": ltx_25(GUIDES, GUIDED),
    "LTXVImgToVideoInplace on LTX 2.5": ltx_25(with_sound(["given", 0], given=INPLACE)),
    "LTXVDurationPredictor": ltx_25(
        with_sound(["empty", 0], head=node("TestModelPatch", kind="duration head", seed=3)), change=of_predicted_length
    ),
    **{
        f"{guidance[0]}{where}": ltx_25(with_sound(["empty", 0]), settings={place: [guidance]})
        for guidance in GUIDANCE
        for where, place in (("", "model_nodes"), (" behind Apply", "after_apply"))
    },
}

# --- others -----------------------------------------------------------------------------------------------------------

SHAPE = {"width": 80, "height": 64, "length": 9}
SEEN = {"start_image": IMAGE, "clip_vision_output": VISION}
HUNYUAN = {"vae": codec(32, 16), "image": picture(80, 64), "vision": vision(4, 40), "low": latent(32, 3, 4, 5)}
VIDEO_80 = {"vae": codec(16), "image": picture(80, 64), "video": picture(80, 64, 13, seed=5)}
SVD = {"vae": codec(4, 8, 0), "init_image": picture(64, 64), "vision": vision(1, 32)}
MINIMAX = {
    "vae": codec(24, 16),
    "clip": text(12, 48),
    "image": picture(96, 64),
    "video": picture(64, 64, 5, seed=5),
    "voice": sound(latent=(1, 32, 2, 3)),
}
MINIMAX_WIRING: dict[str, Link] = {"positive": ["node", 0], "conditioning": ["node", 0], "latent_image": ["node", 1]}
REFERENCES = {
    "ref_images.ref_image_0": IMAGE,
    "ref_videos.ref_video_0": VIDEO,
    "ref_video_audios.ref_video_audio_0": ["voice", 0],
    "ref_audios.ref_audio_0": ["voice", 0],
}


def minimax(class_type: str, **inputs: Any) -> GraphCase:
    made = node(class_type, prompt="a red cube", width=128, height=96, length=5, **inputs)
    return GraphCase("minimax", MINIMAX | {"node": made}, MINIMAX_WIRING, {"cfg": 1.0})


# On the family's own latent, so that it is the same graph without them.
HEARD = {"audio": ["voice", 0], "audio_vae": ["voice", 1]}
MINIMAX_GUIDES = MINIMAX | {
    "picture": node("MiniMaxH3AddGuide", vae=["vae", 0], image=IMAGE, frame_idx=-1),
    "film": node("MiniMaxH3AddGuide", **HEARD, positive=["picture", 0], vae=["vae", 0], image=VIDEO, frame_idx=2),
    "node": node("MiniMaxH3AddGuide", **HEARD, positive=["film", 0]),
}
MINIMAX_MASKS = {
    "kept": picture(64, 64, 3),
    "heard": picture(40, 16, seed=5),
    "parts": node("LTXVSeparateAVLatent", av_latent=LATENT),
    "seen": node("SetLatentNoiseMask", samples=["parts", 0], mask=["kept", 1]),
    "sound": node("SetLatentNoiseMask", samples=["parts", 1], mask=["heard", 1]),
    "node": node("LTXVConcatAVLatent", video_latent=["seen", 0], audio_latent=["sound", 0]),
}
SHIFTS = [node("MiniMaxH3SigmaShift", shift_video=7.0, shift_audio=2.0)]
MINIMAX_033 = {
    f"{name}, {mode}": replace(case, since="0.33.0", degrees={"ulysses_degree": ulysses, "ring_degree": ring})
    for name, case in {
        "MiniMaxH3AddGuide": GraphCase("minimax", MINIMAX_GUIDES, {"positive": ["node", 0]}),
        "masks per token of MiniMax-H3": GraphCase("minimax", MINIMAX_MASKS, {"latent_image": ["node", 0]}),
        "ModelAttentionBackend": GraphCase(
            "minimax",
            settings={"model_nodes": [("ModelAttentionBackend", {"attention": "pytorch attention"})]},
            matters=False,
            since="0.33.0",
        ),
        "MiniMaxH3SigmaShift": GraphCase("minimax", settings={"steps": 2, "model_nodes": SHIFTS}),
    }.items()
    for mode, ulysses, ring in (("Ulysses", 2, 1), ("ring", 1, 2))
}


def made(name: str, served: str, encoders: dict[str, NodeSpec], inputs: dict[str, Any], **case: Any) -> GraphCase:
    """A node, which the name begins with, that gives both conditionings and the latent."""
    return GraphCase(served, encoders | {"node": node(name.partition(",")[0], **inputs)}, ALL, **case)


def void(prompt: Prompt) -> None:
    prompt["sampler_select"] = {"class_type": "VOIDSampler", "inputs": {}}


ENLARGED = {"vae": ["vae", 0], "latent": ["low", 0], "noise_augmentation": 0.7, **SEEN}
KEPT = {"quadmask": MASKS, "width": 80, "height": 64, "length": 13}
FILMED = {"clip_vision": ["vision", 1], "width": 64, "height": 64, "video_frames": 3}
LINEAR = {"model_nodes": [node("VideoLinearCFGGuidance", min_cfg=1.0)], "steps": 2}
KANDINSKY = "kandinsky5-video"
VIDEOS = {
    name: made(name, served, encoders, inputs, **case)
    for name, served, encoders, inputs, case in (
        ("HunyuanVideo15ImageToVideo", "hunyuan_video_15", HUNYUAN, {**SHAPE, **SEEN}, {}),
        ("HunyuanVideo15SuperResolution", "hunyuan_video_15_sr", HUNYUAN, ENLARGED, {}),
        ("Kandinsky5ImageToVideo", KANDINSKY, VIDEO_80, {**SHAPE, "start_image": IMAGE}, {}),
        ("Kandinsky5ImageToVideo, text alone", KANDINSKY, VIDEO_80, SHAPE, {"matters": False}),
        (
            "VOIDInpaintConditioning, VOIDSampler",
            "cogvideox-inpaint",
            VIDEO_80,
            KEPT,
            {"settings": {"node": "SamplerCustomAdvanced"}, "change": void},
        ),
        ("SVD_img2vid_Conditioning", "svd", SVD, FILMED, {"settings": LINEAR, "loader": IMAGE_ONLY}),
    )
} | {
    "MiniMaxH3ImageToVideo": minimax("MiniMaxH3ImageToVideo", first_frame=IMAGE, last_frame=IMAGE),
    "MiniMaxH3ImageToVideo, text alone": minimax("MiniMaxH3ImageToVideo"),
    "MiniMaxH3ReferenceToVideo": minimax("MiniMaxH3ReferenceToVideo", audio_vae=["voice", 1], **REFERENCES),
}

CASES = here(WAN | ANIMATE_2 | LTXV | LTX_25 | VIDEOS | MINIMAX_033)


@pytest.mark.parametrize(("name", "served"), [(name, case.served) for name, case in CASES.items()], ids=CASES)
def test_latent_equals_the_stock_graph(name, served, server, family_checkpoints, as_checkpoint):
    if CASES[name].loader != "UNETLoader":
        as_checkpoint(served)
    assert_stock(server, CASES[name])
