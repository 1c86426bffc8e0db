"""LTX-Video: text and image to video, keyframes, guides with separate strengths; and LTX-2: video with sound."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ..engine.plan import ModulePlan
from ..engine.ranks.sharding import CONTIGUOUS, Split
from ..engine.state import CallState
from ..engine.transforms import Transform
from ..errors import PlanError
from ..nested import tensors
from .family import FamilyPlan, gathered, side, tokens

# With attenuated guides the model attends with a part of its queries at a time, all tokens before the guides first. Each part is a
# stream, so that every rank has some of both. Without attenuation there are no guides: all tokens are "noisy".
VIDEO = ("noisy", "guides")


@dataclass(frozen=True, kw_only=True)
class GuidedVideo:
    """Split video tokens `[B, tokens, D]`, guides last. `per_frame`: inside each frame of the latent, if they are whole frames."""

    per_frame: bool = False

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        self.define(state, value.shape[1], 0)
        layout = state.layout(VIDEO)
        return value if value.shape[1] != layout.total else layout.take_local(value, state.rank, 1)

    def define(self, state: CallState, noisy: int, guides: int) -> None:
        if "noisy" not in state.lengths:
            for stream, length in zip(VIDEO, (noisy, guides), strict=True):
                state.define(stream, length, self._split(state, length))

    def _split(self, state: CallState, length: int) -> Split:
        if not self.per_frame:
            return CONTIGUOUS
        latent = state.arguments["x"][0]
        frames, rest = divmod(length, latent.shape[-2] * latent.shape[-1])
        return Split(frames=frames) if frames and not rest else CONTIGUOUS


@dataclass(frozen=True, kw_only=True)
class GuideMask:
    """Localise ComfyUI's GuideAttentionMask of some video tokens, which knows the start of the guides."""

    video: GuidedVideo

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if not hasattr(value, "tracked_mask"):
            return value
        total, start = value.noisy_mask.shape[-1], value.guide_start
        self.video.define(state, start, total - start)
        return state.once(self, value, lambda: self._local(state, value, total - start))

    def _local(self, state: CallState, value: Any, guides: int) -> Any:
        local = copy.copy(value)
        # Queries behind the tracked guides have no mask: zeros, so that they belong to the same attention.
        local.tracked_mask = F.pad(value.tracked_mask, (0, 0, 0, guides - value.tracked_count))
        local.guide_start, local.tracked_count = (state.layout((name,)).local_lengths[state.rank] for name in VIDEO)
        for queries, mask in zip(VIDEO, (local.noisy_mask, local.tracked_mask), strict=True):
            state.masked[id(mask)] = (mask, ((queries,), VIDEO))
        return local


LTXV = FamilyPlan(
    family="LTX-Video",
    model_class="comfy.ldm.lightricks.model.LTXVModel",
    modules={
        "transformer_blocks.*": ModulePlan(
            inputs={
                "self_attention_mask": GuideMask(video=GuidedVideo()),
                "x": GuidedVideo(),
                "pe": side(VIDEO, dim=1, dims=6),
                "timestep": side(VIDEO, dim=1, dims=3),
            },
            attention=VIDEO,
            local=("attn2",),
        ),
    },
    outputs={"norm_out": gathered(VIDEO)},
)

AUDIO = ("audio",)
VIDEO_TOKENS = GuidedVideo(per_frame=True)
AUDIO_TOKENS = tokens(AUDIO)


def video_and_audio(state: CallState, value: Any, where: str) -> Any:
    return VIDEO_TOKENS(state, value[0], where), AUDIO_TOKENS(state, value[1], where)


def frame_timestep(state: CallState, value: Any, where: str) -> Any:
    """Localise ComfyUI's CompressedTimestep of the video: one row per frame and its number of tokens, one per token, or one."""

    def make() -> Any:
        local, layout = copy.copy(value), state.layout(VIDEO)
        held = layout.local_lengths[state.rank]
        if value.patches_per_frame > 1:
            local.patches_per_frame, rest = divmod(held, value.num_frames)
            if rest or value.num_frames * value.patches_per_frame != layout.total:
                raise PlanError(f"{where}: {value.num_frames} frames are not {layout.total} tokens, {held} of them on this rank")
        elif value.num_frames == layout.total:
            local.data, local.num_frames = layout.take_local(value.data, state.rank, 1), held
        return local

    return value if value is None else state.once(frame_timestep, value, make)


def _side(streams: tuple[str, ...], dims: int, *names: str) -> Mapping[str, Transform]:
    return dict.fromkeys(names, side(streams, dim=1, dims=dims))


def timesteps_are_alike(arguments: Mapping[str, Any]) -> bool:
    """Return whether all items have the same timesteps: gates follow the largest one of the whole batch."""
    times = [*tensors(arguments["timestep"]), *tensors(arguments.get("a_timestep"))]
    return all(torch.equal(time, time[:1].expand_as(time)) for time in times)


LTX2 = FamilyPlan(
    family="LTX-2",
    model_class="comfy.ldm.lightricks.av_model.LTXAVModel",
    modules={
        "transformer_blocks.*": ModulePlan(
            inputs={
                "self_attention_mask": GuideMask(video=VIDEO_TOKENS),
                "x": video_and_audio,
                **dict.fromkeys(("v_timestep", "v_cross_scale_shift_timestep", "v_cross_gate_timestep"), frame_timestep),
                **_side(AUDIO, 3, "a_timestep", "a_cross_scale_shift_timestep", "a_cross_gate_timestep"),
                **_side(VIDEO, 6, "v_pe", "v_cross_pe"),
                **_side(AUDIO, 6, "a_pe", "a_cross_pe"),
            },
        ),
        "transformer_blocks.*.attn1": ModulePlan(attention=VIDEO),
        "transformer_blocks.*.audio_attn1": ModulePlan(attention=AUDIO),
        "transformer_blocks.*.audio_to_video_attn": ModulePlan(attention=VIDEO, keys=AUDIO),
        "transformer_blocks.*.video_to_audio_attn": ModulePlan(attention=AUDIO, keys=VIDEO),
    },
    outputs={"transformer_blocks.-1": [None, gathered("audio")], "norm_out": gathered(VIDEO)},
    shares_batch=timesteps_are_alike,
)
