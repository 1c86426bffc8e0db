"""Wan-Animate 2: a video that follows another one, whose own branch feeds keys and values to every block of the first.

Ranks compute that branch in every step: the cache of WanAnimate2Cache stays in ComfyUI's process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from .family import side, tokens
from .wan import FREQS, HEAD, VIDEO, WAN, Repeated

POSES = ("poses",)
# Each frame of the video attends alone: to the whole video, and to the frame of the poses in front of it.
FRAME, WITH_POSE = ("frame",), ("video", "pose")


def video_frames(state: CallState) -> int:
    """Return the latent frames of the video, the reference image in front included."""
    return int(state.arguments["x"].shape[2])


def pose_frames(state: CallState) -> int:
    """Return the latent frames of the poses: none for the reference image."""
    return video_frames(state) - 1


def frame_length(state: CallState, value: Any, where: str) -> Any:
    """Replace the number of tokens of a frame by that of its tokens on this rank."""
    for stream in (*FRAME, "pose"):
        state.define(stream, value)
    return state.layout(FRAME).local_lengths[state.rank]


def buffers(state: CallState, value: tuple[Tensor, ...] | None, where: str) -> tuple[Tensor, ...] | None:
    """Cut the buffers of a block to this rank's tokens: keys and values `[B, video + a frame, H, D]`, outputs `[B, video, C]`."""
    if value is None:
        return None
    video, frame = (state.layout(streams).local_lengths[state.rank] for streams in (VIDEO, FRAME))
    keys, values, outputs = value
    return keys[:, : video + frame], values[:, : video + frame], outputs[:, :video]


ANIMATE_2 = replace(
    WAN,
    family="Wan-Animate 2",
    model_class="comfy.ldm.wan.model_animate2.WanAnimate2Model",
    since="0.33.0",
    modules={
        "blocks.*:forward_pose": ModulePlan(
            inputs={"x": tokens(POSES, frames=pose_frames), "freqs": side(POSES, dim=1, dims=6)},
            attention=POSES,
            local=("cross_attn",),
        ),
        "blocks.*:forward_gen": ModulePlan(
            inputs={
                "x": tokens(VIDEO, frames=video_frames),
                "freqs": FREQS,
                "e": Repeated(streams=VIDEO, ndim=4),
                "hw": frame_length,
                "buffers": buffers,
            },
            local=("cross_attn",),
        ),
        "head": HEAD,
    },
    attention=((FRAME, WITH_POSE), (FRAME, VIDEO), (VIDEO, VIDEO)),
)
