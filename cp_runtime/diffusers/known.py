"""Facts about diffusers' classes beyond their tables: joint orders, missing entries, and tables for classes without one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from ..engine.plan import ModulePlan, argument_positions
from ..engine.transforms import ContextParallelInput, ContextParallelOutput, TokenRanges

HIDDEN, ENCODER = "hidden_states", "encoder_hidden_states"  # diffusers' names: image or video tokens, text tokens
AUDIO = "audio_hidden_states"
Table = Mapping[str, Any]


class Known(NamedTuple):
    """A class whose sharded forward tests compare with one process.

    Args:
        order: order in which attention joins the streams; empty = separate cross-attention to text.
        table: entries beside those of the class's own `_cp_plan`.
        staged: its blocks can be divided into stages.
    """

    order: tuple[str, ...] = ()
    table: Table = MappingProxyType({})
    staged: bool = False


_TEXT_FIRST, _IMAGE_FIRST = (ENCODER, HIDDEN), (HIDDEN, ENCODER)
_TOKENS, _TOKENS_OUT = ContextParallelInput(1, 3), ContextParallelInput(1, 4, split_output=True)
_POSITIONS_OUT = ContextParallelInput(0, 2, split_output=True)
_IMAGE_POSITIONS = {"image_rotary_emb": ContextParallelInput(0, 2, streams=(HIDDEN,), side=True)}
_OF_IMAGE = ContextParallelInput(1, 3, streams=(HIDDEN,))  # such as residuals of ControlNets, one or a list
_FLUX = {"": {"controlnet_block_samples": _OF_IMAGE, "controlnet_single_block_samples": _OF_IMAGE}}
_WHOLE = ModulePlan(attention=())
_GATHERED = {"proj_out": ContextParallelOutput(1, 3)}
_JOINT = {"transformer_blocks.0": {HIDDEN: _TOKENS, ENCODER: _TOKENS}, **_GATHERED}
_ROPE = {"rope": {0: _POSITIONS_OUT, 1: _POSITIONS_OUT}}
# Models that continue an image ("token_replace") modulate its tokens, the first of the video, apart: blocks get their number.
_FIRST_FRAME = ModulePlan(
    inputs={"num_tokens": TokenRanges(streams=(HIDDEN,))},
    when=lambda model, path: "num_tokens" in argument_positions(model.get_submodule(path)),
)
_WAN_ROPE = {"rope": {0: _TOKENS_OUT, 1: _TOKENS_OUT}}
# Every rank has all of the audio, a fiftieth of the video; only its attention to the video is shared.
_TOKEN_STEPS = ContextParallelInput(1, 2, streams=(HIDDEN,))
_SPLIT_ROPE = {i: ContextParallelInput(-2, split_output=True) for i in (0, 1)}  # with heads in front of the tokens, or without
_LTX_2: Table = {
    "": {
        "timestep": _TOKEN_STEPS,
        "video_keyframes_mask": _OF_IMAGE,
        AUDIO: ContextParallelInput(1, 3, streams=(AUDIO,), replicated=True),
    },
    "rope": _SPLIT_ROPE,
    "cross_attn_rope": _SPLIT_ROPE,
    "transformer_blocks.*.audio_attn1": _WHOLE,
    "transformer_blocks.*.audio_attn2": _WHOLE,
    "transformer_blocks.*.audio_to_video_attn": _WHOLE,
    "transformer_blocks.*.video_to_audio_attn": ModulePlan(attention=(AUDIO,), keys=(HIDDEN,)),
}
CLASSES: Mapping[str, Known] = {
    "FluxTransformer2DModel": Known(_TEXT_FIRST, _FLUX, staged=True),
    "Flux2Transformer2DModel": Known(_TEXT_FIRST),
    "QwenImageTransformer2DModel": Known(_TEXT_FIRST, {"": {"controlnet_block_samples": _OF_IMAGE}}),
    "CogVideoXTransformer3DModel": Known(_TEXT_FIRST, {**_JOINT, "transformer_blocks.*": _IMAGE_POSITIONS}),
    "SD3Transformer2DModel": Known(_IMAGE_FIRST, {"": {"block_controlnet_hidden_states": _OF_IMAGE}, **_JOINT}, staged=True),
    "HunyuanVideoTransformer3DModel": Known(
        _IMAGE_FIRST,
        {**_JOINT, **_ROPE, "transformer_blocks.*": _FIRST_FRAME, "single_transformer_blocks.*": _FIRST_FRAME},
    ),
    "HunyuanImageTransformer2DModel": Known(_IMAGE_FIRST, {**_JOINT, **_ROPE}),
    "HunyuanVideo15Transformer3DModel": Known(
        _IMAGE_FIRST, {**_JOINT, **_ROPE, "transformer_blocks.*": {"attention_mask": ContextParallelInput(1, 2)}}
    ),
    "WanTransformer3DModel": Known(staged=True),
    "ChronoEditTransformer3DModel": Known(),
    "HeliosTransformer3DModel": Known(),
    "LTXVideoTransformer3DModel": Known((), {"": {"timestep": _TOKEN_STEPS}}),
    "LTX2VideoTransformer3DModel": Known((), _LTX_2),
    "MiniMaxH3Transformer3DModel": Known(),
    "PixArtTransformer2DModel": Known((), {"transformer_blocks.0": {HIDDEN: _TOKENS}, **_GATHERED}, staged=True),
    "HunyuanDiT2DModel": Known(
        (),
        {
            "": {"controlnet_block_samples": _OF_IMAGE},
            "time_extra_emb": _WHOLE,
            "blocks.0": {HIDDEN: _TOKENS},
            "blocks.*": _IMAGE_POSITIONS,
            **_GATHERED,
        },
        staged=True,
    ),
    "SkyReelsV2Transformer3DModel": Known((), {**_WAN_ROPE, "blocks.0": {HIDDEN: _TOKENS}, **_GATHERED}),
    "WanVACETransformer3DModel": Known(
        (),
        {
            **_WAN_ROPE,
            "vace_blocks.0": {HIDDEN: _TOKENS, "control_hidden_states": _OF_IMAGE},
            "blocks.0": {HIDDEN: _TOKENS},
            **_GATHERED,
        },
    ),
    # Text and image are joint before the layers. The refiners in front of them run whole on every rank.
    "Lumina2Transformer2DModel": Known(
        (),
        {
            "layers.0": {HIDDEN: _TOKENS},
            "layers.*": {"image_rotary_emb": ContextParallelInput(1, 3, streams=(HIDDEN,), side=True)},
            "norm_out": ContextParallelOutput(1, 3),
        },
    ),
}


def known(module: nn.Module) -> Known | None:
    """Return the facts about a module's class, or about its base with the same forward, as FSDP2 derives classes."""
    classes = (cls for cls in type(module).__mro__ if getattr(cls, "forward", None) is type(module).forward)
    return next((CLASSES[cls.__name__] for cls in classes if cls.__name__ in CLASSES), None)


def own_table(module: nn.Module) -> Table | None:
    """Return diffusers' table for a module, completed, or the table set on the module itself; None if there is none."""
    theirs: Table = getattr(module, "_cp_plan", None) or {}
    found = known(module)
    if found is None or "_cp_plan" in vars(module):
        return theirs or None
    both = {path: {**theirs[path], **found.table[path]} for path in theirs.keys() & found.table.keys() if path == ""}
    return {**theirs, **found.table, **both} or None


def is_proven(module: nn.Module, plan: object) -> bool:
    return plan is None and known(module) is not None and "_cp_plan" not in vars(module)
