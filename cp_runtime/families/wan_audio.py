"""Wan models that attend to sound, faces or music frame by frame: S2V, HuMo, Animate, WanDancer. Split inside each frame."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..engine.plan import ModulePlan
from ..engine.sharding import Split
from ..engine.state import CallState
from ..engine.transforms import ContextParallelInput
from .family import FamilyPlan, gathered
from .wan import FREQS, HEAD, WAN, Repeated, block

# S2V: the video, then reference and shrunken motion frames: whole runs of tokens that have one modulation, and what is left.
TOKENS = ("video", "references", "tail")


def latent_frames(state: CallState) -> int:
    """Return the number of latent frames, appended ones included."""
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
    """Replace the length of the video by the number of its tokens on this rank."""
    return state.layout(("video",)).local_lengths[state.rank]


S2V = FamilyPlan(
    family="Wan S2V",
    model_class="comfy.ldm.wan.model.WanModel_S2V",
    modules={
        "blocks.*": ModulePlan(
            inputs={
                "x": VideoThenReferences(split_dim=1, expected_dims=3, streams=TOKENS),
                "freqs": replace(FREQS, streams=TOKENS),
                "e": Repeated(streams=TOKENS, ndim=4),
            },
            attention=TOKENS,
            local=("cross_attn",),
        ),
        "audio_injector": ModulePlan(inputs={"seq_len": local_length}),
        "head": ModulePlan(inputs={"e": Repeated(streams=TOKENS, ndim=3)}),
    },
    outputs={"head": gathered(TOKENS)},
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
