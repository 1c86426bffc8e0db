"""The node classes that ComfyUI's templates put around each family, on the family's tiny model: the latent is the stock graph's.

Encoders are stand-ins of the family's compression and width (tests/support/comfy_nodes/stand_ins.py); the nodes are the real ones.
The sequence is split, never the batch, where a family has one to split.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support import families
from support.graphs import Link, NodeSpec, Prompt, family_prompt

from cp_runtime.families import PLANS

TOLERANCE = 2e-4
SERVED = families.served()

CHECKPOINT, IMAGE_ONLY = "CheckpointLoaderSimple", "ImageOnlyCheckpointLoader"
POSITIVE, NEGATIVE, LATENT = ["positive", 0], ["negative", 0], ["latent", 0]
PAIR = {"positive": POSITIVE, "negative": NEGATIVE}
BOTH: dict[str, Link] = {"positive": ["node", 0], "negative": ["node", 1]}
ALL: dict[str, Link] = {**BOTH, "latent_image": ["node", 2]}
# Entries of a family's conditioning that are its text encoder's. The others come from the nodes under test.
OF_TEXT = ("attention_mask", "conditioning_byt5small", "conditioning_llama3", "pooled_output", "text_input_ids")


@dataclass(frozen=True)
class Case:
    """A graph of a family, with nodes beside it.

    Args:
        served: name of the family's model.
        nodes: by id; `node` is the one that the case is about.
        wiring: inputs of the sampler or its guider.
        settings: of `sampling_prompt`; one step unless it says more, as it is about what the model is given.
        loader: class of the node that loads the model.
        change: what else is other than in the family's graph.
        matters: whether the latent must be another one without all this.
        since: first of the tested versions of ComfyUI that has the nodes; 0 = all have them.
        degrees: of CP Config, where it is not left to the pack how the sequence is split.
    """

    served: str
    nodes: Mapping[str, NodeSpec] = field(default_factory=dict)
    wiring: Mapping[str, Link] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    loader: str = "UNETLoader"
    change: Callable[[Prompt], None] | None = None
    matters: bool = True
    since: str = "0"
    degrees: Mapping[str, int] = field(default_factory=dict)

    def build(self, cp: Mapping[str, Any] | None = None) -> Prompt:
        _, entry, _ = SERVED[self.served]
        if self.nodes:
            entry = replace(entry, cond={name: value for name, value in entry.cond.items() if name in OF_TEXT})
        prompt = family_prompt(entry, cp=cp, others=self.nodes, **{"cfg": 3.0, "steps": 1, "node": "CPSampler", **self.settings})
        for sampler in ("sampler", "guider"):
            inputs = prompt.get(sampler, {"inputs": {}})["inputs"]
            inputs.update({name: link for name, link in self.wiring.items() if name in inputs})
        if self.loader != "UNETLoader":
            inputs = {"ckpt_name": families.checkpoint_of(entry)}
            prompt["loader"] = {"class_type": self.loader, "inputs": inputs}
        if self.change is not None:
            self.change(prompt)
        return prompt


# --- stand-ins --------------------------------------------------------------------------------------------------------


def codec(channels: int, space: int = 8, time: int = 4) -> NodeSpec:
    return "TestCodec", {"seed": 2, "channels": channels, "space": space, "time": time}


def picture(width: int, height: int, frames: int = 1, seed: int = 4) -> NodeSpec:
    return "TestImage", {"seed": seed, "width": width, "height": height, "frames": frames}


def vision(tokens: int = 257, width: int = 1280, seed: int = 3) -> NodeSpec:
    return "TestVision", {"seed": seed, "tokens": tokens, "width": width}


def sound(**shapes: tuple[int, ...]) -> NodeSpec:
    return "TestSound", {"seed": 6, **{name: json.dumps(shape) for name, shape in shapes.items()}}


def text(tokens: int, width: int, **extra: Any) -> NodeSpec:
    """With more entries as TestConditioning takes them."""
    return "TestEncoder", {"tokens": tokens, "width": width, "extra": json.dumps(extra)}


def latent(*shape: int, seed: int = 8, noise: float = 1.0) -> NodeSpec:
    return "TestLatent", {"batch": 1, "shapes": json.dumps([shape]), "noise": noise, "seed": seed}


# --- Wan --------------------------------------------------------------------------------------------------------------

START, REFERENCE = {"start_image": ["image", 0]}, {"ref_image": ["image", 0]}
SEEN = {"clip_vision_output": ["vision", 0]}


def wan(class_type: str, served: str, *, width: int = 80, batch: bool = True, length: int = 9, **inputs: Any) -> Case:
    """A node that gives both conditionings and the latent."""
    size = {"width": width, "height": 64, "length": length, **({"batch_size": 1} if batch else {})}
    encoders = {"vae": codec(16), "image": picture(width, 64), "video": picture(width, 64, 9, seed=5), "vision": vision()}
    others = {
        "pair": picture(width, 64, 2),
        "motion": picture(width, 64, 73),
        "camera": ("WanCameraEmbedding", {"camera_pose": "Zoom In", "width": width, "height": 64, "length": length}),
        "s2v_sound": sound(features=(25, 400, 32)),
        "humo_sound": sound(features=(33, 60, 1280)),
        "music": sound(feature=(1, 40, 35)),
        "earlier": latent(16, 19, 8, width // 8),
    }
    used = {value[0] for value in inputs.values() if isinstance(value, list)}
    nodes = encoders | {name: spec for name, spec in others.items() if name in used}
    return Case(served, nodes | {"node": (class_type, {**PAIR, "vae": ["vae", 0], **size, **inputs})}, ALL)


def extended() -> Case:
    """No size: that of the video before."""
    case = wan(
        "WanSoundImageToVideoExtend",
        "wan_s2v",
        video_latent=["earlier", 0],
        audio_encoder_output=["s2v_sound", 2],
        control_video=["video", 0],
        **REFERENCE,
    )
    for name in ("width", "height", "batch_size"):
        del case.nodes["node"][1][name]
    return case


WAN = {
    "WanVaceToVideo": wan(
        "WanVaceToVideo",
        "wan_vace",
        strength=0.8,
        control_video=["video", 0],
        control_masks=["video", 1],
        reference_image=["image", 0],
    ),
    "WanVaceToVideo, text alone": wan("WanVaceToVideo", "wan_vace", strength=1.0),
    "WanCameraImageToVideo": wan("WanCameraImageToVideo", "wan_camera", camera_conditions=["camera", 0], **START),
    "WanSoundImageToVideo": wan(
        "WanSoundImageToVideo",
        "wan_s2v",
        audio_encoder_output=["s2v_sound", 2],
        control_video=["video", 0],
        ref_motion=["motion", 0],
        **REFERENCE,
    ),
    "WanSoundImageToVideoExtend": extended(),
    "WanHuMoImageToVideo": wan("WanHuMoImageToVideo", "humo", audio_encoder_output=["humo_sound", 2], **REFERENCE),
    "WanHuMoImageToVideo, silent": wan("WanHuMoImageToVideo", "humo"),
    "WanSCAILToVideo": wan(
        "WanSCAILToVideo",
        "scail_2",
        width=64,
        pose_video=["video", 0],
        pose_video_mask=["video", 0],
        replacement_mode=True,
        pose_strength=0.9,
        pose_start=0.0,
        pose_end=1.0,
        reference_image=["pair", 0],
        reference_image_mask=["pair", 0],
        video_frame_offset=0,
        previous_frame_count=5,
        previous_frames=["video", 0],
        **SEEN,
    ),
    "WanDancerVideo": wan(
        "WanDancerVideo",
        "wan_dancer",
        width=64,
        batch=False,
        audio_encoder_output=["music", 2],
        clip_vision_output_ref=["vision", 0],
        **START,
        **SEEN,
    ),
    "WanDancerVideo, mask": wan(
        "WanDancerVideo",
        "wan_dancer",
        width=64,
        batch=False,
        audio_encoder_output=["music", 2],
        start_image=["video", 0],
        mask=["video", 1],
    ),
    "WanPhantomSubjectToVideo": replace(
        wan("WanPhantomSubjectToVideo", "wan_phantom", images=["pair", 0]),
        wiring={"positive": ["node", 0], "negative": ["node", 2], "latent_image": ["node", 3]},
    ),
}

POSED = wan(
    "WanAnimate2ToVideo",
    "wan_animate2",
    reference_image=["image", 0],
    pose_video=["video", 0],
    positive_pose=["motion_text", 0],
    clip_vision_output_pose=["other_vision", 0],
    video_frame_offset=0,
    pose_strength=0.9,
    pose_start_percent=0.0,
    pose_end_percent=1.0,
    reference_image_strength=0.8,
    **SEEN,
)
POSED_NODES = POSED.nodes | {
    "motion_text": ("TestConditioning", {"seed": 9, "tokens": 6, "width": 48}),
    "other_vision": vision(seed=9),
}
LONGER = ("WanAnimate2ToVideo", {**POSED.nodes["node"][1], "length": 25})
HALFWAY = ("WanAnimate2ToVideo", {**POSED.nodes["node"][1], "pose_end_percent": 0.5})
# Three frames of the latent, one of them shared.
WINDOWS = {
    "context_length": 3, "context_overlap": 1, "context_schedule": "standard_static", "context_stride": 1, "closed_loop": False,
    "fuse_method": "pyramid", "dim": 2, "freenoise": True, "cond_retain_index_list": "0", "split_conds_to_windows": False,
    "latent_retain_index_list": "", "causal_window_fix": True,
}  # fmt: skip
ANIMATED = [("ModelSamplingSD3", {"shift": 5.0}), ("WanAnimate2Cache", {"device": "cpu", "dtype": "default"})]
ANIMATE_2 = {
    name: replace(POSED, nodes=POSED_NODES | {"node": node}, settings=settings)
    for name, node, settings in (
        ("WanAnimate2ToVideo", POSED.nodes["node"], {}),
        ("WanAnimate2ToVideo, for half of the steps", HALFWAY, {"steps": 2}),
        ("WanAnimate2Cache", POSED.nodes["node"], {"steps": 2, "model_nodes": ANIMATED}),
        ("WanAnimate2Cache behind Apply", POSED.nodes["node"], {"steps": 2, "after_apply": ANIMATED}),
        # Without the cache: ComfyUI 0.33 fails where windows are of different lengths.
        ("ContextWindowsManual on Wan-Animate 2", LONGER, {"model_nodes": [("ContextWindowsManual", WINDOWS)]}),
    )
}

# --- LTX --------------------------------------------------------------------------------------------------------------

LTX: dict[str, NodeSpec] = {
    "vae": codec(128, 32, 8),
    "image": picture(128, 128),
    "video": picture(128, 128, 9, seed=5),
    "empty": ("EmptyLTXVLatentVideo", {"width": 128, "height": 128, "length": 17, "batch_size": 1}),
    "frames": ("LTXVConditioning", {**PAIR, "frame_rate": 24.0}),
}
FRAMES = {"positive": ["frames", 0], "negative": ["frames", 1]}
INPLACE = {"vae": ["vae", 0], "image": ["image", 0], "strength": 0.8, "bypass": False}


def with_sound(video: Link, **nodes: NodeSpec) -> dict[str, NodeSpec]:
    concat = ("LTXVConcatAVLatent", {"video_latent": video, "audio_latent": ["sound", 0]})
    return {**LTX, **nodes, "sound": latent(8, 10, 16, noise=0.0), "joint": concat}


def guide(positive: Link, negative: Link, video: Link, image: str, **inputs: Any) -> NodeSpec:
    links = {"positive": positive, "negative": negative, "vae": ["vae", 0], "latent": video, "image": [image, 0]}
    return "LTXVAddGuide", {**links, **inputs}


GUIDED = with_sound(
    ["second", 2],
    first=guide(["frames", 0], ["frames", 1], ["empty", 0], "video", frame_idx=0, strength=0.7),
    second=guide(["first", 0], ["first", 1], ["first", 2], "image", frame_idx=-1, strength=1.0, attention_mask=["image", 1]),
)
GUIDED_WIRING: dict[str, Link] = {"positive": ["second", 0], "negative": ["second", 1], "latent_image": ["joint", 0]}


def two_stages(prompt: Prompt) -> None:
    """The first stage's video goes on without its guides, but with its first frame given; its sound goes on as it is."""
    add = {
        "apart": ("LTXVSeparateAVLatent", {"av_latent": ["sampler", 0]}),
        "cropped": ("LTXVCropGuides", {"positive": ["second", 0], "negative": ["second", 1], "latent": ["apart", 0]}),
        "given": ("LTXVImgToVideoInplace", {**INPLACE, "latent": ["cropped", 2]}),
        "again": ("LTXVConcatAVLatent", {"video_latent": ["given", 0], "audio_latent": ["apart", 1]}),
    }
    prompt |= {name: {"class_type": cls, "inputs": inputs} for name, (cls, inputs) in add.items()}
    conds = {"positive": ["cropped", 0], "negative": ["cropped", 1], "latent_image": ["again", 0], "denoise": 0.6}
    prompt["sampler_2"] = {"class_type": "KSampler", "inputs": {**prompt["sampler"]["inputs"], **conds}}
    for index in range(2):
        prompt[f"part_{index}"]["inputs"]["samples"] = ["sampler_2", 0]


REFERENCE_AUDIO = (
    "LTXVReferenceAudio",
    {
        **FRAMES,
        "reference_audio": ["voice", 0],
        "audio_vae": ["voice", 1],
        "identity_guidance_scale": 3.0,
        "start_percent": 0.0,
        "end_percent": 1.0,
    },
)
LTXV = {
    "LTXVConditioning": Case("ltxv", LTX, FRAMES, loader=CHECKPOINT, matters=False),
    "LTXVImgToVideo": Case(
        "ltxv",
        LTX
        | {
            "node": (
                "LTXVImgToVideo",
                {
                    **FRAMES,
                    "vae": ["vae", 0],
                    "image": ["image", 0],
                    "width": 128,
                    "height": 128,
                    "length": 17,
                    "batch_size": 1,
                    "strength": 0.9,
                },
            )
        },
        ALL,
        loader=CHECKPOINT,
    ),
    "LTX-2, text": Case("ltx2", with_sound(["empty", 0]), {**FRAMES, "latent_image": ["joint", 0]}, loader=CHECKPOINT),
    "LTXVImgToVideoInplace": Case(
        "ltx2",
        with_sound(["given", 0], given=("LTXVImgToVideoInplace", {**INPLACE, "latent": ["empty", 0]})),
        {**FRAMES, "latent_image": ["joint", 0]},
        loader=CHECKPOINT,
    ),
    "LTXVAddGuide": Case("ltx2", GUIDED, GUIDED_WIRING, loader=CHECKPOINT),
    "LTXVCropGuides, two stages": Case("ltx2", GUIDED, GUIDED_WIRING, loader=CHECKPOINT, change=two_stages),
    **{
        name: Case(
            "ltx2",
            with_sound(["empty", 0], voice=sound(latent=(1, 8, 4, 16))),
            {"positive": ["model_0", 1], "negative": ["model_0", 2], "latent_image": ["joint", 0]},
            {place: [REFERENCE_AUDIO]},
            CHECKPOINT,
        )
        for name, place in {"LTXVReferenceAudio": "model_nodes", "LTXVReferenceAudio behind Apply": "after_apply"}.items()
    },
}

SOUND_25 = {**FRAMES, "latent_image": ["joint", 0]}
STG = {"scale": 1.5, "blocks": "1", "start_percent": 0.0, "end_percent": 1.0}
MODALITY = {"modality_scale": 3.0, "start_percent": 0.0, "end_percent": 1.0}


def dual_cfg(prompt: Prompt) -> None:
    inputs = {name: link for name, link in prompt["guider"]["inputs"].items() if name != "cfg"}
    prompt["guider"] = {"class_type": "LTXVDualCFGGuider", "inputs": {**inputs, "video_cfg": 3.0, "audio_cfg": 7.0}}


def of_predicted_length(prompt: Prompt) -> None:
    inputs = {"positive": ["frames", 0], "duration_head": ["head", 0], "frame_rate": 24.0, "min_seconds": 0.5, "max_seconds": 2.0}
    inputs["model"] = prompt["sampler"]["inputs"]["model"]
    prompt["duration"] = {"class_type": "LTXVDurationPredictor", "inputs": inputs}
    prompt["empty"]["inputs"]["length"] = ["duration", 0]


LTX_25 = {
    "LTXVDualCFGGuider": Case("ltx2.5", with_sound(["empty", 0]), SOUND_25, {"node": "SamplerCustomAdvanced"}, change=dual_cfg),
    "LTXVAddGuide on LTX 2.5": Case("ltx2.5", GUIDED, GUIDED_WIRING),
    "LTXVImgToVideoInplace on LTX 2.5": Case(
        "ltx2.5", with_sound(["given", 0], given=("LTXVImgToVideoInplace", {**INPLACE, "latent": ["empty", 0]})), SOUND_25
    ),
    "LTXVDurationPredictor": Case(
        "ltx2.5",
        with_sound(["empty", 0], head=("TestModelPatch", {"kind": "duration head", "seed": 3})),
        SOUND_25,
        change=of_predicted_length,
    ),
    **{
        f"{name}{where}": Case("ltx2.5", with_sound(["empty", 0]), SOUND_25, {place: [(name, inputs)]})
        for name, inputs in (("LTXVSpatioTemporalGuidance", STG), ("LTXVModalityGuidance", MODALITY))
        for where, place in (("", "model_nodes"), (" behind Apply", "after_apply"))
    },
}

# --- other videos -----------------------------------------------------------------------------------------------------

SHAPE = {"width": 80, "height": 64, "length": 9, "batch_size": 1}
HUNYUAN = {"vae": codec(32, 16), "image": picture(80, 64), "vision": vision(4, 40)}
VIDEO_80 = {"vae": codec(16), "image": picture(80, 64), "video": picture(80, 64, 13, seed=5)}
MINIMAX = {
    "vae": codec(24, 16),
    "clip": text(12, 48),
    "image": picture(96, 64),
    "video": picture(64, 64, 5, seed=5),
    "voice": sound(latent=(1, 32, 2, 3)),
}
MINIMAX_SIZE = {"clip": ["clip", 0], "vae": ["vae", 0], "prompt": "a red cube", "width": 128, "height": 96, "length": 5}
MINIMAX_WIRING: dict[str, Link] = {"positive": ["node", 0], "conditioning": ["node", 0], "latent_image": ["node", 1]}


def minimax(class_type: str, **inputs: Any) -> Case:
    return Case("minimax", MINIMAX | {"node": (class_type, {**MINIMAX_SIZE, **inputs})}, MINIMAX_WIRING, {"cfg": 1.0})


# On the family's own latent, so that it is the same graph without them.
ANCHOR = {"latent": LATENT, "vae": ["vae", 0], "audio_vae": ["voice", 1]}
MINIMAX_GUIDES = MINIMAX | {
    "picture": ("MiniMaxH3AddGuide", {**ANCHOR, "positive": POSITIVE, "image": ["image", 0], "frame_idx": -1}),
    "clip": (
        "MiniMaxH3AddGuide",
        {**ANCHOR, "positive": ["picture", 0], "image": ["video", 0], "audio": ["voice", 0], "frame_idx": 2},
    ),
    "node": ("MiniMaxH3AddGuide", {**ANCHOR, "positive": ["clip", 0], "audio": ["voice", 0], "frame_idx": 0}),
}
MINIMAX_MASKS = {
    "kept": picture(64, 64, 3),
    "heard": picture(40, 16, seed=5),
    "parts": ("LTXVSeparateAVLatent", {"av_latent": LATENT}),
    "seen": ("SetLatentNoiseMask", {"samples": ["parts", 0], "mask": ["kept", 1]}),
    "sound": ("SetLatentNoiseMask", {"samples": ["parts", 1], "mask": ["heard", 1]}),
    "node": ("LTXVConcatAVLatent", {"video_latent": ["seen", 0], "audio_latent": ["sound", 0]}),
}
SHIFTS = [("MiniMaxH3SigmaShift", {"shift_video": 7.0, "shift_audio": 2.0})]
MINIMAX_033 = {
    f"{name}, {mode}": replace(case, degrees=degrees)
    for name, case in {
        "MiniMaxH3AddGuide": Case("minimax", MINIMAX_GUIDES, {"positive": ["node", 0]}),
        "masks per token of MiniMax-H3": Case("minimax", MINIMAX_MASKS, {"latent_image": ["node", 0]}),
        "MiniMaxH3SigmaShift": Case("minimax", settings={"steps": 2, "model_nodes": SHIFTS}),
    }.items()
    for mode, degrees in {
        "Ulysses": {"ulysses_degree": 2, "ring_degree": 1},
        "ring": {"ulysses_degree": 1, "ring_degree": 2},
    }.items()
}


def void(prompt: Prompt) -> None:
    prompt["sampler_select"] = {"class_type": "VOIDSampler", "inputs": {}}


VIDEOS = {
    "HunyuanVideo15ImageToVideo": Case(
        "hunyuan_video_15",
        HUNYUAN | {"node": ("HunyuanVideo15ImageToVideo", {**PAIR, "vae": ["vae", 0], **SHAPE, **START, **SEEN})},
        ALL,
    ),
    "HunyuanVideo15SuperResolution": Case(
        "hunyuan_video_15_sr",
        HUNYUAN
        | {
            "low": latent(32, 3, 4, 5),
            "node": (
                "HunyuanVideo15SuperResolution",
                {**PAIR, "vae": ["vae", 0], "latent": ["low", 0], "noise_augmentation": 0.7, **START, **SEEN},
            ),
        },
        ALL,
    ),
    "Kandinsky5ImageToVideo": Case(
        "kandinsky5-video", VIDEO_80 | {"node": ("Kandinsky5ImageToVideo", {**PAIR, "vae": ["vae", 0], **SHAPE, **START})}, ALL
    ),
    "Kandinsky5ImageToVideo, text alone": Case(
        "kandinsky5-video",
        VIDEO_80 | {"node": ("Kandinsky5ImageToVideo", {**PAIR, "vae": ["vae", 0], **SHAPE})},
        ALL,
        matters=False,
    ),
    "MiniMaxH3ImageToVideo": minimax("MiniMaxH3ImageToVideo", first_frame=["image", 0], last_frame=["image", 0]),
    "MiniMaxH3ImageToVideo, text alone": minimax("MiniMaxH3ImageToVideo"),
    "MiniMaxH3ReferenceToVideo": minimax(
        "MiniMaxH3ReferenceToVideo",
        audio_vae=["voice", 1],
        ref_image_size="match",
        **{
            "ref_images.ref_image_0": ["image", 0],
            "ref_videos.ref_video_0": ["video", 0],
            "ref_video_audios.ref_video_audio_0": ["voice", 0],
            "ref_audios.ref_audio_0": ["voice", 0],
        },
    ),
    "VOIDInpaintConditioning, VOIDSampler": Case(
        "cogvideox-inpaint",
        VIDEO_80
        | {
            "node": (
                "VOIDInpaintConditioning",
                {
                    **PAIR,
                    "vae": ["vae", 0],
                    "video": ["video", 0],
                    "quadmask": ["video", 1],
                    "width": 80,
                    "height": 64,
                    "length": 13,
                    "batch_size": 1,
                },
            )
        },
        ALL,
        {"node": "SamplerCustomAdvanced"},
        change=void,
    ),
    "SVD_img2vid_Conditioning": Case(
        "svd",
        {
            "vae": codec(4, 8, 0),
            "image": picture(64, 64),
            "vision": vision(1, 32),
            "node": (
                "SVD_img2vid_Conditioning",
                {
                    "clip_vision": ["vision", 1],
                    "init_image": ["image", 0],
                    "vae": ["vae", 0],
                    "width": 64,
                    "height": 64,
                    "video_frames": 3,
                    "motion_bucket_id": 127,
                    "fps": 6,
                    "augmentation_level": 0.0,
                },
            ),
        },
        ALL,
        {"model_nodes": [("VideoLinearCFGGuidance", {"min_cfg": 1.0})], "steps": 2},
        IMAGE_ONLY,
    ),
}

# --- images, shapes ---------------------------------------------------------------------------------------------------

FRONT, LEFT = vision(7, 48), vision(7, 48, seed=9)
SMOOTH = {"start_percent": 0.0, "end_percent": 1.0, "pattern": "single_shift", "passes": "4", "blend": "window", "strength": 1.0}
RADIANCE = {
    "preserve_wrapper": True, "start_sigma": 1.0, "end_sigma": 0.0, "nerf_tile_size": 4, "force_sequential_txt_ids": True
}  # fmt: skip


def unclip(conditioning: Link, image: str) -> NodeSpec:
    links = {"conditioning": conditioning, "clip_vision_output": [image, 0]}
    return "unCLIPConditioning", {**links, "strength": 1.0, "noise_augmentation": 0.1}


OTHERS = {
    "LotusConditioning": Case(
        "sd2_lotus",
        {"node": ("LotusConditioning", {})},
        {"conditioning": ["node", 0]},
        {"cfg": 1.0, "node": "SamplerCustomAdvanced"},
    ),
    "unCLIPConditioning": Case(
        "sdxl_unclip",
        {
            "seen": vision(1, 1280),
            "other": vision(1, 1280, seed=9),
            "first": unclip(POSITIVE, "seen"),
            "node": unclip(["first", 0], "other"),
        },
        {"positive": ["node", 0]},
        loader=CHECKPOINT,
    ),
    "InstructPixToPixConditioning on HiDream-E1": Case(
        "hidream",
        {
            "vae": codec(16, 8, 0),
            "image": picture(128, 128),
            "node": ("InstructPixToPixConditioning", {**PAIR, "vae": ["vae", 0], "pixels": ["image", 0]}),
        },
        ALL,
    ),
    "HiDreamO1ReferenceImages": Case(
        "hidream o1",
        {"image": picture(64, 64), "node": ("HiDreamO1ReferenceImages", {**PAIR, "images.image_1": ["image", 0]})},
        BOTH,
        loader=CHECKPOINT,
    ),
    "HiDreamO1PatchSeamSmoothing": Case(
        "hidream o1",
        {"large": latent(3, 128, 128)},
        {"latent_image": ["large", 0]},
        {"model_nodes": [("HiDreamO1PatchSeamSmoothing", SMOOTH)]},
        CHECKPOINT,
    ),
    "ChromaRadianceOptions": Case("chroma_radiance", settings={"model_nodes": [("ChromaRadianceOptions", RADIANCE)]}),
    "ChromaRadianceOptions behind Apply": Case("chroma_radiance", settings={"after_apply": [("ChromaRadianceOptions", RADIANCE)]}),
    "PiDConditioning": Case(
        "pid",
        {
            "low": latent(4, 8, 8),
            "node": (
                "PiDConditioning",
                {"positive": POSITIVE, "latent": ["low", 0], "latent_format": "sdxl", "degrade_sigma": 0.3},
            ),
            "zero": ("ConditioningZeroOut", {"conditioning": ["node", 0]}),
        },
        {"positive": ["node", 0], "negative": ["zero", 0]},
    ),
    "Hunyuan3Dv2Conditioning": Case(
        "hunyuan3d_2",
        {"front": FRONT, "node": ("Hunyuan3Dv2Conditioning", {"clip_vision_output": ["front", 0]})},
        BOTH,
        loader=IMAGE_ONLY,
    ),
    "Hunyuan3Dv2ConditioningMultiView": Case(
        "hunyuan3d_2",
        {"front": FRONT, "left": LEFT, "node": ("Hunyuan3Dv2ConditioningMultiView", {"front": ["front", 0], "left": ["left", 0]})},
        BOTH,
        loader=IMAGE_ONLY,
    ),
    "Hunyuan3Dv2Conditioning on 2.1": Case(
        "hunyuan3d_21",
        {"front": FRONT, "node": ("Hunyuan3Dv2Conditioning", {"clip_vision_output": ["front", 0]})},
        BOTH,
        loader=IMAGE_ONLY,
    ),
}

# --- sound, upscaling, splats -----------------------------------------------------------------------------------------

SONG = {
    "clip": ["clip", 0], "tags": "piano", "lyrics": "la la", "seed": 1, "bpm": 120, "duration": 2.0, "timesignature": "4",
    "language": "en", "keyscale": "C major", "generate_audio_codes": True, "cfg_scale": 2.0, "temperature": 0.85, "top_p": 0.9,
    "top_k": 0, "min_p": 0.0,
}  # fmt: skip
LYRICAL = {
    "clip": ["clip", 0], "caption": "piano", "lyrics": "la la", "seed": 1, "max_duration": 2.0, "cfg_scale": 1.7, "top_k": 50
}  # fmt: skip
LYRICS = {"tensor": [[*range(9)]], "dtype": "int64"}
CODES = [[5, 63999, 1234, 20000]]
SPLATS = {"vae": ["splats", 0], "octree_level": 5, "num_gaussians": 1024, "yaw": 90.0, "pitch": 15.0, "point_size": 3}


def zeroed(node: NodeSpec) -> dict[str, NodeSpec]:
    """The node gives the positive conditioning, and the negative one is nothing."""
    return {"node": node, "zero": ("ConditioningZeroOut", {"conditioning": ["node", 0]})}


ZEROED: dict[str, Link] = {"positive": ["node", 0], "negative": ["zero", 0]}
MORE = {
    "TextEncodeAceStepAudio": Case(
        "ace_step",
        {"clip": text(7, 48, conditioning_lyrics=LYRICS)}
        | zeroed(("TextEncodeAceStepAudio", {"clip": ["clip", 0], "tags": "piano", "lyrics": "la la", "lyrics_strength": 0.9})),
        ZEROED,
        loader=CHECKPOINT,
    ),
    "TextEncodeAceStepAudio1.5": Case(
        "ace_step_15",
        {"clip": text(7, 48, conditioning_lyrics={"shape": [1, 9, 48]})} | zeroed(("TextEncodeAceStepAudio1.5", SONG)),
        ZEROED,
    ),
    "TextEncodeAceStepAudio1.5, codes": Case(
        "ace_step_15",
        {"clip": text(7, 48, conditioning_lyrics={"shape": [1, 9, 48]}, audio_codes=CODES)}
        | zeroed(("TextEncodeAceStepAudio1.5", SONG)),
        ZEROED,
    ),
    "MiniMaxMusic3TextEncode": Case(
        "minimax_music",
        {"clip": text(12, 256)} | zeroed(("MiniMaxMusic3TextEncode", LYRICAL)),
        ZEROED,
        since="0.33.0",
    ),
    "SeedVR2Conditioning": Case(
        "seedvr2 text",
        {"low": latent(16, 5, 8, 10), "node": ("SeedVR2Conditioning", {"model": ["loader", 0], "vae_conditioning": ["low", 0]})},
        BOTH,
        {"cfg": 1.0},
    ),
    # Its latent has 8192 tokens, the tiny model fewer: the sampler takes the family's. That also keeps the preview from
    # decoding, which it survives.
    "TripoSplatConditioning, TripoSplatSamplingPreview": Case(
        "triposplat",
        {
            "splats": ("TestSplats", {}),
            "vae": codec(12, 16, 0),
            "image": picture(64, 48),
            "vision": vision(13, 48),
            "node": ("TripoSplatConditioning", {"clip_vision": ["vision", 1], "vae": ["vae", 0], "image": ["image", 0]}),
        },
        BOTH,
        {"model_nodes": [("TripoSplatSamplingPreview", SPLATS)]},
    ),
}

# --- checkpoints ------------------------------------------------------------------------------------------------------

LOADED = {
    f"Load Checkpoint, {name}": Case(name, loader=CHECKPOINT, matters=False)
    for name in ("sd15", "sdxl", "sdxl_refiner", "sd3", "flux", "lumina2", "stable_audio_open", "stable_audio_3")
}
NEWER = {name: replace(case, since="0.33.0") for name, case in (ANIMATE_2 | LTX_25 | MINIMAX_033).items()}
ALL_CASES = WAN | LTXV | VIDEOS | OTHERS | MORE | LOADED | NEWER
CASES = {name: case for name, case in ALL_CASES.items() if families.exists(case.since)}

_latents: dict[tuple[str, int], Any] = {}


def latents(server, prompt: Prompt) -> dict[str, Any]:
    return saved(server, server.run(prompt, timeout=300).check())


def saved(server, result) -> dict[str, Any]:
    return {node: server.latent(result, node) for node, output in result.outputs.items() if "latents" in output}


@pytest.mark.parametrize(("name", "served"), [(name, case.served) for name, case in CASES.items()], ids=CASES)
def test_latent_equals_the_stock_graph(name, served, server, family_checkpoints, as_checkpoint):
    assert served not in family_checkpoints, family_checkpoints[served]
    case = CASES[name]
    if case.loader != "UNETLoader":
        as_checkpoint(served)
    expected = latents(server, case.build())
    shares = PLANS[SERVED[served][2].cls].shares_sequence
    cp = {"world_size": 2, "batch_degree": 1 if shares else 0, **case.degrees}
    result = server.run(case.build(cp), timeout=300).check()
    out = saved(server, result)
    if "report" in result.outputs:
        report = json.loads(result.outputs["report"]["text"][0])
        ranks = report["ranks"]
        assert case.degrees.items() <= {f"{axis}_degree": degree for axis, degree in report["degrees"].items()}.items()
        assert [rank["pid"] for rank in ranks] == server.worker_pids()
        assert not shares or all(any(rank["tokens"].values()) for rank in ranks), ranks
    assert out.keys() == expected.keys()
    for node, stock in expected.items():
        assert stock.std() > 1e-2
        assert (out[node] - stock).abs().max() <= TOLERANCE * stock.std()
    if case.matters:
        steps = case.settings.get("steps", 1)
        if (served, steps) not in _latents:
            _latents[served, steps] = latents(server, Case(served, settings={"steps": steps}).build())
        plain = _latents[served, steps]
        assert any(differs(plain[node], stock) for node, stock in expected.items())


def differs(one, other) -> bool:
    return one.shape != other.shape or bool((one - other).abs().max() > 1e-2 * one.std())
