"""Wan-Animate 2: a reference image, a video and the poses of another one."""

from typing import Any

import torch

from . import Case, Model, Served, normal
from .wan import IMAGE_MODEL, WAN, init, wan

MODELS = {
    "wan animate 2": Model("comfy.ldm.wan.model_animate2.WanAnimate2Model", dict(WAN, model_type="animate2", in_dim=36),
        "WAN_Animate2", IMAGE_MODEL, init, since="0.33.0"),
}  # fmt: skip


def animate(batch: int = 1, frames: int = 4, height: int = 8, width: int = 10, **extra: Any) -> dict[str, Any]:
    poses = {"pose_latents": normal(batch, 16, frames - 1, height, width, seed=1)}
    return wan(batch, frames, height, width, channels=36, **{**poses, **extra})


CLIP: dict[str, Any] = {"clip_fea": normal(1, 257, 1280), "clip_fea_pose": normal(1, 257, 1280, seed=2)}
TIMES = torch.linspace(100.0, 900.0, 4)[None]
CASES = [
    Case("animate2", "wan animate 2", animate, ("pose_latents",)),
    Case("animate2 odd batch 2", "wan animate 2", lambda: animate(2, 3, 7, 9), ("pose_latents",)),
    Case("animate2 a frame of 2 tokens", "wan animate 2", lambda: animate(height=2, width=4), ("pose_latents",)),
    Case("animate2 without poses", "wan animate 2", lambda: animate(pose_latents=None)),
    Case("animate2 an image", "wan animate 2", lambda: animate(frames=1, pose_latents=None)),
    Case("animate2 texts, images and strengths", "wan animate 2",
        lambda: animate(context_pose=normal(1, 5, 48, seed=3), pose_strength=0.5, reference_strength=0.7, **CLIP),
        ("context_pose", "clip_fea")),
    Case("animate2 a time per frame", "wan animate 2", lambda: animate(timestep=TIMES), ("pose_latents",)),
]  # fmt: skip
SERVED = [
    Served("wan_animate2", "wan animate 2", (16, 4, 8, 10), 6, 48,
        {"pose_video_latent": (1, 16, 3, 8, 10), "concat_latent_image": (1, 16, 4, 8, 10), "clip_vision_output": (1, 257, 1280)}),
]  # fmt: skip
