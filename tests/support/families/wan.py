"""Wan 2.1 and 2.2: text and image to video, first and last frame, Fun, 5B, camera control, VACE, SCAIL."""

from typing import Any

import torch
from torch import Tensor

from . import Case, Model, Served, denoise, normal

WAN = dict(
    model_type="t2v", dim=96, out_dim=16, num_heads=4, ffn_dim=128, num_layers=2, patch_size=(1, 2, 2), freq_dim=64, in_dim=16,
    text_dim=48,
)  # fmt: skip
CLASS = "comfy.ldm.wan.model."
IMAGE_MODEL = {"image_model": "wan2.1"}


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Patches of the size of what attention adds to them."""
    return values / parameter[0].numel() ** 0.5 if parameter.ndim > 3 else None


def model(config: str, cls: str = "WanModel", **arguments: Any) -> Model:
    return Model(CLASS + cls, {**WAN, **arguments}, config, IMAGE_MODEL, init)


MODELS = {
    "wan t2v": model("WAN21_T2V"),
    "wan 3 heads": model("WAN21_T2V", num_heads=3),
    "wan i2v": model("WAN21_I2V", model_type="i2v", in_dim=36),
    "wan flf": model("WAN21_I2V", model_type="i2v", in_dim=36, flf_pos_embed_token_number=514),
    "wan fun control": model("WAN21_FunControl2V", model_type="i2v", in_dim=48),
    "wan fun 2.2": model("WAN21_T2V", in_dim=52, in_dim_ref_conv=16),
    "wan ref": model("WAN21_T2V", in_dim_ref_conv=16),
    "wan 5b": model("WAN22_T2V", in_dim=48, out_dim=48),
    "wan camera": model("WAN21_Camera", "CameraWanModel", model_type="camera", in_dim=32),
    "wan camera 2.2": model("WAN22_Camera", "CameraWanModel", model_type="camera_2.2", in_dim=36),
    "wan vace": model("WAN21_Vace", "VaceWanModel", model_type="vace", num_layers=4, vace_layers=2, vace_in_dim=96),
    "scail": model("WAN21_SCAIL", "SCAILWanModel", model_type="scail", in_dim=20),
    "scail 2": model("WAN21_SCAIL2", "SCAIL2WanModel", model_type="scail2", in_dim=20),
}


def wan(
    batch: int = 1, frames: int = 3, height: int = 8, width: int = 10, text: int = 6, channels: int = 16, **extra: Any
) -> dict[str, Any]:
    return denoise(batch, (channels, frames, height, width), text, most=900.0) | extra


def vace(contexts: int = 1, batch: int = 1, frames: int = 3, height: int = 8, width: int = 10, **extra: Any) -> dict[str, Any]:
    control = normal(batch, contexts, 96, frames, height, width, seed=4)
    strength = [1.0, 0.6, 0.3][:contexts]
    return wan(batch, frames, height, width, **{"vace_context": control, "vace_strength": strength, **extra})


def scail(**extra: Any) -> dict[str, Any]:
    reference = {"reference_latent": normal(1, 20, 1, 8, 10, seed=1), "pose_latents": normal(1, 20, 3, 4, 6, seed=2)}
    return wan(channels=20, **{**reference, **extra})


PER_FRAME = torch.tensor([[0.0, 400.0, 900.0]])
MASKS = {"ref_mask_latents": normal(1, 28, 4, 8, 10), "sam_latents": normal(1, 28, 3, 4, 6)}
IN_CONTEXT = [normal(1, 16, 1, 6, 4), normal(1, 16, 2, 8, 10)]
ROPE = {"rope_options": {"scale_t": 1.5, "shift_y": 2.0, "shift_x": 0.5}}

CASES = [
    Case("wan t2v", "wan t2v", wan),
    Case("wan t2v batch 2 odd", "wan t2v", lambda: wan(batch=2, frames=5, height=7, width=9, text=5)),
    Case("wan one frame", "wan t2v", lambda: wan(frames=1)),
    Case("wan one token", "wan t2v", lambda: wan(frames=1, height=2, width=2)),
    Case("wan 3 heads", "wan 3 heads", wan),
    Case("wan rope options", "wan t2v", wan, options=ROPE),
    Case("wan per-frame timesteps", "wan t2v", lambda: wan(timestep=PER_FRAME)),
    Case("wan per-frame timesteps batch 2", "wan t2v",
        lambda: wan(batch=2, timestep=torch.tensor([[0.0, 400.0, 900.0], [10.0, 20.0, 30.0]]))),
    Case("wan per-frame timesteps, frames of 2 tokens", "wan t2v", lambda: wan(height=2, width=4, timestep=PER_FRAME)),
    Case("wan per-frame timesteps, more frames", "wan t2v",
        lambda: wan(timestep=PER_FRAME, time_dim_concat=normal(1, 16, 2, 8, 10)), ("time_dim_concat",)),
    Case("wan per-frame timesteps, context latents", "wan t2v", lambda: wan(timestep=PER_FRAME, context_latents=IN_CONTEXT),
        ("context_latents",)),
    Case("wan time concat", "wan t2v", lambda: wan(time_dim_concat=normal(1, 16, 2, 8, 10)), ("time_dim_concat",)),
    Case("wan context latents", "wan t2v", lambda: wan(context_latents=IN_CONTEXT), ("context_latents",)),
    Case("wan i2v", "wan i2v", lambda: wan(channels=36)),
    Case("wan i2v clip", "wan i2v", lambda: wan(channels=36, clip_fea=normal(1, 257, 1280)), ("clip_fea",)),
    Case("wan first and last frame", "wan flf", lambda: wan(channels=36, clip_fea=normal(1, 514, 1280)), ("clip_fea",)),
    Case("wan fun control", "wan fun control", lambda: wan(channels=48, clip_fea=normal(1, 257, 1280)), ("clip_fea",)),
    Case("wan fun 2.2", "wan fun 2.2", lambda: wan(channels=52, reference_latent=normal(1, 16, 8, 10)), ("reference_latent",)),
    Case("wan reference latent", "wan ref", lambda: wan(reference_latent=normal(1, 16, 8, 10)), ("reference_latent",)),
    Case("wan reference latent, per-frame timesteps", "wan ref",
        lambda: wan(reference_latent=normal(1, 16, 8, 10), timestep=PER_FRAME), ("reference_latent",)),
    Case("wan 5b", "wan 5b", lambda: wan(channels=48)),
    Case("wan 5b per-frame timesteps", "wan 5b", lambda: wan(channels=48, height=7, timestep=PER_FRAME)),
    Case("wan camera", "wan camera",
        lambda: wan(channels=32, clip_fea=normal(1, 257, 1280), camera_conditions=normal(1, 24, 3, 64, 80)),
        ("camera_conditions",)),
    Case("wan camera 2.2", "wan camera 2.2", lambda: wan(channels=36, batch=2, camera_conditions=normal(2, 24, 3, 64, 80)),
        ("camera_conditions",)),
    Case("wan camera odd", "wan camera", lambda: wan(channels=32, height=7, width=9, clip_fea=normal(1, 257, 1280)), ("clip_fea",)),
    Case("vace", "wan vace", vace),
    Case("vace batch 2 odd", "wan vace", lambda: vace(batch=2, frames=5, height=6, width=6)),
    Case("vace contexts", "wan vace", lambda: vace(contexts=3)),
    Case("vace contexts batch 2", "wan vace", lambda: vace(contexts=2, batch=2)),
    Case("scail", "scail", scail, ("reference_latent", "pose_latents")),
    Case("scail odd", "scail", lambda: wan(channels=20, height=7, width=9)),
    Case("scail clip, batch 2", "scail", lambda: scail(
        x=normal(2, 20, 3, 8, 10), timestep=torch.tensor([300.0, 900.0]), context=normal(2, 6, 48), clip_fea=normal(2, 257, 1280),
        reference_latent=normal(2, 20, 1, 8, 10), pose_latents=normal(2, 20, 3, 4, 6),
    ), ("clip_fea", "pose_latents")),
    Case("scail 2", "scail 2", lambda: scail(**MASKS), ("sam_latents", "ref_mask_latents")),
    Case("scail 2 replacement", "scail 2", lambda: scail(**MASKS, ref_mask_flag=False), ("ref_mask_flag",)),
    Case("scail 2 references", "scail 2",
        lambda: scail(reference_latent=normal(1, 20, 2, 8, 10), ref_mask_flag=True, ref_mask_latents=normal(1, 28, 5, 8, 10)),
        ("ref_mask_latents",)),
]  # fmt: skip

LATENT = (16, 3, 8, 10)
VIDEO = (1, *LATENT)
CONCAT = {"concat_latent_image": VIDEO, "concat_mask": (1, 1, 3, 8, 10)}
SERVED = [
    Served("wan_t2v", "wan t2v", LATENT, 6, 48),
    Served("wan_phantom", "wan t2v", LATENT, 6, 48, {"time_dim_concat": (1, 16, 2, 8, 10)}),
    Served("wan_bernini", "wan t2v", LATENT, 6, 48, {"context_latents": [(1, 16, 1, 6, 4), VIDEO]}),
    Served("wan_i2v", "wan i2v", LATENT, 6, 48, {**CONCAT, "clip_vision_output": (1, 257, 1280)}),
    Served("wan_flf", "wan flf", LATENT, 6, 48, {**CONCAT, "clip_vision_output": (1, 514, 1280)}),
    Served("wan_fun_control", "wan fun control", LATENT, 6, 48, {"concat_latent_image": (1, 32, 3, 8, 10)}),
    Served("wan_fun_22", "wan fun 2.2", LATENT, 6, 48, {
        "concat_latent_image": (1, 32, 3, 8, 10), "concat_mask": (1, 1, 3, 8, 10), "concat_mask_index": 16,
        "reference_latents": [(1, 16, 1, 8, 10)],
    }),
    Served("wan_5b", "wan 5b", (48, 3, 8, 10), 6, 48, {"denoise_mask": torch.tensor([0.0, 1.0, 0.5]).view(1, 1, 3, 1, 1)}),
    Served("wan_camera", "wan camera 2.2", LATENT, 6, 48, {**CONCAT, "camera_conditions": (1, 24, 3, 64, 80)}),
    Served("wan_vace", "wan vace", LATENT, 6, 48, {
        "vace_frames": [(1, 32, 3, 8, 10)] * 2, "vace_mask": [(1, 64, 3, 8, 10)] * 2, "vace_strength": [1.0, 0.5],
    }),
    Served("scail", "scail", LATENT, 6, 48, {"reference_latents": [(1, 16, 1, 8, 10)], "pose_video_latent": (1, 16, 3, 4, 6)}),
    Served("scail_2", "scail 2", LATENT, 6, 48, {
        "reference_latents": [(1, 16, 1, 8, 10)] * 2, "pose_video_latent": (1, 16, 3, 4, 6), "driving_mask_28ch": (1, 3, 28, 4, 6),
        "ref_mask_28ch": (1, 5, 28, 8, 10), "ref_mask_flag": False,
    }),
]  # fmt: skip
