"""Wan 2.1 and 2.2: text and image to video, per-frame timesteps, in-context references, camera control, VACE, SCAIL; sound, faces
and music; Wan-Animate 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..engine.plan import ModulePlan
from ..engine.ranks.sharding import Split
from ..engine.state import CallState
from ..engine.transforms import ContextParallelInput
from .family import FamilyPlan, gathered, side, tokens

VIDEO = ("video",)
EXTRA_TOKENS = ("time_dim_concat", "reference_latent", "context_latents", "pose_latents")


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Localise a value per run of tokens, `[B, runs, ...]`, which the module repeats over its tokens (`repeat_e`).

    It passes unchanged if repeating it over the local tokens is equivalent (streams split inside each run), because a value per
    token is large. Values with other dimensions, or with one run, apply to all tokens and pass too.
    """

    streams: tuple[str, ...]
    ndim: int

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if not isinstance(value, Tensor) or value.ndim != self.ndim or value.shape[1] == 1 or state.world_size == 1:
            return value
        return state.once(self, value, lambda: self._local(state, value))

    def _local(self, state: CallState, value: Tensor) -> Tensor:
        layout, runs = state.layout(self.streams), value.shape[1]

        def due_on(device: torch.device | str) -> Tensor:
            # The tokens of a run are rounded up where they are not whole; so the last run may be shorter.
            return layout.take_local(torch.arange(layout.total, device=device) // -(-layout.total // runs), state.rank, 0)

        due = due_on("cpu")
        # It repeats nothing if it finds one value per token, which it also assumes below two tokens per run.
        fits = len(due) == runs or len(due) // runs != 1
        if fits and torch.equal(due, torch.arange(len(due)) // -(-len(due) // runs)):
            return value
        return value.index_select(1, due_on(value.device))  # a copy to a GPU makes the host wait


def timed_frames(state: CallState) -> int:
    """Return the number of frames if each has its own timestep and there are no other tokens, else 1."""
    x, timestep = state.arguments["x"], state.arguments["timestep"]
    plain = all(state.arguments.get(name) is None for name in EXTRA_TOKENS)
    return x.shape[2] if plain and timestep.ndim == 2 and timestep.shape[1] == x.shape[2] else 1


FREQS = side(VIDEO, dim=1, dims=6)


def block(frames: Callable[[CallState], int], *local: str) -> ModulePlan:
    """Plan blocks of video tokens, split inside each frame; `local` names submodules with local attention besides cross_attn."""
    return ModulePlan(
        inputs={"x": tokens(VIDEO, frames=frames), "freqs": FREQS, "e": Repeated(streams=VIDEO, ndim=4)},
        attention=VIDEO,
        local=("cross_attn", *local),
    )


BLOCK = block(timed_frames)
HEAD = ModulePlan(inputs={"e": Repeated(streams=VIDEO, ndim=3)})

WAN = FamilyPlan(
    family="Wan",
    model_class="comfy.ldm.wan.model.WanModel",
    modules={"blocks.*": BLOCK, "head": HEAD},
    outputs={"head": gathered("video")},
)
CAMERA = replace(WAN, family="Wan Camera", model_class="comfy.ldm.wan.model.CameraWanModel")
SCAIL = replace(WAN, family="SCAIL", model_class="comfy.ldm.wan.model.SCAILWanModel")
SCAIL_2 = replace(WAN, family="SCAIL-2", model_class="comfy.ldm.wan.model.SCAIL2WanModel")
VACE = replace(
    WAN,
    family="Wan VACE",
    model_class="comfy.ldm.wan.model.VaceWanModel",
    modules={
        "blocks.*": BLOCK,
        "vace_blocks.*": ModulePlan(
            inputs={
                "c": tokens(VIDEO),
                # The hidden states before the first block, the same for all of these.
                "x": side(VIDEO, dim=1, dims=3),
                "kwargs.freqs": FREQS,
                "kwargs.e": Repeated(streams=VIDEO, ndim=4),
            },
            attention=VIDEO,
            local=("cross_attn",),
        ),
        "head": HEAD,
    },
)
# For autoregressive sampling. Without the state of such a sampler it is an ordinary Wan; with it, it is refused.
CAUSAL_WAN = replace(WAN, family="Causal Wan", model_class="comfy.ldm.wan.ar_model.CausalWanModel")

# Models that attend to sound, faces or music frame by frame: S2V, HuMo, Animate, WanDancer. Split inside each frame.

# S2V: the video, then reference and shrunken motion frames: whole runs of tokens with one modulation, and the rest.
S2V_TOKENS = ("video", "references", "tail")


def latent_frames(state: CallState) -> int:
    appended = state.arguments.get("time_dim_concat")
    return int(state.arguments["x"].shape[2]) + (0 if appended is None else int(appended.shape[2]))


def sound_frames(state: CallState) -> int:
    """Return HuMo's number of frames with 16 tokens of sound each, reference frames included."""
    sound, reference = state.arguments.get("audio_embed"), state.arguments.get("reference_latent")
    return 1 if sound is None else sound.shape[1] + (0 if reference is None else reference.shape[2])


def music_frames(state: CallState) -> int:
    """Return WanDancer's number of runs with a token of music each: eight per frame."""
    return 1 if state.arguments.get("audio_embed") is None else 8 * latent_frames(state)


@dataclass(frozen=True)
class VideoThenReferences(ContextParallelInput):
    """Split S2V's tokens. The number of references follows from the length."""

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        x, sound, frames = state.arguments["x"], state.arguments.get("audio_embed"), latent_frames(state)
        # Patches of 2 × 2, to which the model pads rows and columns.
        video = frames * -(-x.shape[3] // 2) * -(-x.shape[4] // 2)
        if sound is not None:  # as many frames as the sound has: two convolutions halve it
            frames = -(-min(sound.shape[3], 4 * frames) // 4)
        # With motion frames, which are small, half a frame is such a run.
        if state.arguments.get("reference_motion") is not None and video % (2 * frames) == 0:
            frames *= 2
        size = max(1, video // frames)
        runs, tail = divmod(value.shape[1] - video, size)
        state.define("video", video, Split(frames))
        state.define("references", runs * size, Split(max(1, runs)))
        state.define("tail", tail)
        return super().__call__(state, value, where)


def local_length(state: CallState, value: Any, where: str) -> Any:
    return state.layout(("video",)).local_lengths[state.rank]


S2V = FamilyPlan(
    family="Wan S2V",
    model_class="comfy.ldm.wan.model.WanModel_S2V",
    modules={
        "blocks.*": ModulePlan(
            inputs={
                "x": VideoThenReferences(split_dim=1, expected_dims=3, streams=S2V_TOKENS),
                "freqs": replace(FREQS, streams=S2V_TOKENS),
                "e": Repeated(streams=S2V_TOKENS, ndim=4),
            },
            attention=S2V_TOKENS,
            local=("cross_attn",),
        ),
        "audio_injector": ModulePlan(inputs={"seq_len": local_length}),
        "head": ModulePlan(inputs={"e": Repeated(streams=S2V_TOKENS, ndim=3)}),
    },
    outputs={"head": gathered(S2V_TOKENS)},
)
HUMO = replace(
    WAN,
    family="HuMo",
    model_class="comfy.ldm.wan.model.HumoWanModel",
    modules={"blocks.*": block(sound_frames, "audio_cross_attn_wrapper"), "head": HEAD},
)
ANIMATE = replace(
    WAN,
    family="Wan Animate",
    model_class="comfy.ldm.wan.model_animate.AnimateWanModel",
    modules={"blocks.*": block(latent_frames), "head": HEAD},
)
DANCER = replace(
    WAN,
    family="WanDancer",
    model_class="comfy.ldm.wan.model_wandancer.WanDancerModel",
    modules={
        "blocks.*": block(music_frames),
        "music_injector": ModulePlan(inputs={"seq_len": local_length}),
        "head": HEAD,
        "head_global": HEAD,
    },
    outputs={**WAN.outputs, "head_global": WAN.outputs["head"]},
)

# Wan-Animate 2: a video that follows another one, whose separate branch feeds keys and values to every block of the first. Ranks
# compute that branch in every step: the cache of WanAnimate2Cache stays in ComfyUI's process.
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
    unstaged="the model calls other methods of its blocks than forward",
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
