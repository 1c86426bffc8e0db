"""Wan models with sound, faces or music frame by frame: S2V, HuMo, Animate, WanDancer."""

from typing import Any

from torch import Tensor

from ..sizes import FACE
from . import Case, Model, Served, normal
from .wan import IMAGE_MODEL, WAN, wan
from .wan import init as wan_init

CLASS = "comfy.ldm.wan.model."
# Widths of what turns sound into tokens, and of what looks at faces.
SOUND = {
    f"comfy.ldm.wan.model:{name}": {512: 40, 1536: 96} for name in ("HumoWanModel", "WanAttentionBlockAudio", "AudioProjModel")
}


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    if name == "casual_audio_encoder.weights":  # normalised by their sum
        return 1.0 + 0.3 * values
    return None if name.startswith("motion_encoder") else wan_init(name, parameter, values)


MODELS = {
    "wan s2v": Model(CLASS + "WanModel_S2V", dict(WAN, model_type="s2v", audio_dim=32, audio_inject_layers=[0, 1]), "WAN22_S2V",
        IMAGE_MODEL, init),
    "humo": Model(CLASS + "HumoWanModel", dict(WAN, model_type="humo"), "WAN21_HuMo", IMAGE_MODEL, init, sizes=SOUND),
    # One face block for five blocks.
    "wan animate": Model("comfy.ldm.wan.model_animate.AnimateWanModel", dict(WAN, model_type="animate", in_dim=36, num_layers=5),
        "WAN22_Animate", IMAGE_MODEL, init, sizes=FACE),
    "wan dancer": Model("comfy.ldm.wan.model_wandancer.WanDancerModel",
        dict(WAN, model_type="wandancer", in_dim=36, audio_inject_layers=[0, 1]), "WAN22_WanDancer", IMAGE_MODEL, init),
}  # fmt: skip


def s2v(batch: int = 1, frames: int = 3, height: int = 8, width: int = 10, sound: int = 0, **extra: Any) -> dict[str, Any]:
    audio = normal(batch, 25, 32, sound or 4 * frames, seed=7)
    return wan(batch, frames, height, width, audio_embed=audio, **extra)


def humo(frames: int = 3, references: int = 0, batch: int = 1, **extra: Any) -> dict[str, Any]:
    reference = {"reference_latent": normal(batch, 16, references, 8, 10, seed=1)} if references else {}
    audio = normal(batch, frames, 8, 5, 1280, seed=2)
    return wan(batch, frames, **{**reference, "audio_embed": audio, **extra})


def animate(**extra: Any) -> dict[str, Any]:
    return wan(channels=36, **{"pose_latents": normal(1, 16, 2, 8, 10, seed=1), **extra})


def dancer(batch: int = 1, height: int = 8, width: int = 8, **extra: Any) -> dict[str, Any]:
    call = {
        "clip_fea": normal(batch, 5, 1280),
        "clip_fea_ref": normal(batch, 5, 1280, seed=1),
        "audio_embed": normal(batch, 40, 35),
    }
    return wan(batch, channels=36, height=height, width=width, **{**call, **extra})


REFERENCE: dict[str, Any] = {"reference_latent": normal(1, 16, 1, 8, 10, seed=1)}
EVERYTHING: dict[str, Any] = {
    **REFERENCE,
    "reference_motion": normal(1, 16, 19, 8, 10, seed=2),
    "control_video": normal(1, 16, 3, 8, 10, seed=3),
}
CASES = [
    Case("s2v", "wan s2v", s2v, ("audio_embed",)),
    Case("s2v silent", "wan s2v", wan),
    Case("s2v odd batch 2", "wan s2v", lambda: s2v(batch=2, frames=2, height=7, width=9)),
    Case("s2v one frame", "wan s2v", lambda: s2v(frames=1)),
    Case("s2v frames of 2 tokens", "wan s2v", lambda: s2v(height=2, width=4), ("audio_embed",)),
    Case("s2v reference", "wan s2v", lambda: s2v(**REFERENCE), ("audio_embed", "reference_latent")),
    Case("s2v smaller reference", "wan s2v", lambda: s2v(reference_latent=normal(1, 16, 2, 6, 6)), ("reference_latent",)),
    Case("s2v everything", "wan s2v", lambda: s2v(**EVERYTHING), tuple(EVERYTHING)),
    Case("s2v motion of whole runs", "wan s2v", lambda: s2v(height=16, width=16, reference_motion=normal(1, 16, 19, 16, 16)),
        ("audio_embed", "reference_motion")),
    Case("s2v short motion", "wan s2v", lambda: s2v(reference_motion=normal(1, 16, 5, 8, 10)), ("reference_motion",)),
    Case("s2v short sound", "wan s2v", lambda: s2v(frames=4, sound=8), ("audio_embed",)),
    Case("s2v more frames", "wan s2v", lambda: s2v(sound=20, time_dim_concat=normal(1, 16, 2, 8, 10)), ("time_dim_concat",)),
    Case("humo", "humo", humo, ("audio_embed",)),
    Case("humo silent", "humo", wan),
    Case("humo odd", "humo", lambda: humo(frames=2, x=normal(1, 16, 2, 7, 9))),
    Case("humo references", "humo", lambda: humo(references=2), ("audio_embed", "reference_latent")),
    Case("humo reference batch 2", "humo", lambda: humo(references=1, batch=2), ("reference_latent",)),
    Case("animate", "wan animate", animate, ("pose_latents",)),
    Case("animate odd batch 2", "wan animate", lambda: wan(batch=2, frames=2, height=7, width=9, channels=36)),
    Case("animate face", "wan animate",
        lambda: wan(channels=36, frames=2, clip_fea=normal(1, 257, 1280), face_pixel_values=normal(1, 3, 1, 512, 512)),
        ("face_pixel_values",)),
    Case("dancer", "wan dancer", dancer, ("audio_embed", "clip_fea_ref", "clip_fea")),
    Case("dancer batch 2", "wan dancer", lambda: dancer(batch=2, width=16, audio_inject_scale=0.5), ("audio_inject_scale",)),
    Case("dancer fps", "wan dancer", lambda: dancer(fps=24.0), ("fps", "audio_embed")),
    Case("dancer silent, odd", "wan dancer", lambda: dancer(audio_embed=None, height=7, width=9)),
]  # fmt: skip

LATENT = (16, 3, 8, 10)
SERVED = [
    Served("wan_s2v", "wan s2v", LATENT, 6, 48, {
        "audio_embed": (1, 25, 32, 12), "reference_latents": [(1, 16, 1, 8, 10)], "reference_motion": (1, 16, 19, 8, 10),
        "control_video": (1, 16, 3, 8, 10),
    }),
    Served("humo", "humo", LATENT, 6, 48, {"audio_embed": (1, 3, 8, 5, 1280), "reference_latents": [(1, 16, 1, 8, 10)]}),
    # Without a face: tests/ranks has it.
    Served("wan_animate", "wan animate", LATENT, 6, 48,
        {"pose_video_latent": (1, 16, 2, 8, 10), "concat_latent_image": (1, *LATENT), "clip_vision_output": (1, 257, 1280)}),
    Served("wan_dancer", "wan dancer", (16, 3, 8, 8), 6, 48, {
        "audio_embed": (1, 40, 35), "fps": 30.0, "audio_inject_scale": 1.0, "concat_latent_image": (1, 16, 3, 8, 8),
        "clip_vision_output": (1, 5, 1280),
    }),
]  # fmt: skip
