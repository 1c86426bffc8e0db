"""LTX-2: video with sound."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from ..engine.transforms import Transform
from ..errors import PlanError
from ..nested import tensors
from .family import FamilyPlan, gathered, side, tokens
from .ltxv import VIDEO, GuidedVideo, GuideMask

AUDIO = ("audio",)
VIDEO_TOKENS = GuidedVideo(per_frame=True)
AUDIO_TOKENS = tokens(AUDIO)


def video_and_audio(state: CallState, value: Any, where: str) -> Any:
    """Split the tokens of both, given as a pair."""
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
