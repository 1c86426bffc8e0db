"""Facts about diffusers' classes beyond their tables: joint orders, missing entries, and tables for classes without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from ..engine.plan import ModulePlan, argument_positions
from ..engine.ranks.sharding import Split
from ..engine.state import CallState
from ..engine.transforms import ContextParallelInput, ContextParallelOutput, TokenRanges
from ..errors import PlanError

HIDDEN, ENCODER = "hidden_states", "encoder_hidden_states"  # diffusers' names: image or video tokens, text tokens
AUDIO = "audio_hidden_states"
Table = Mapping[str, Any]
Dims = Mapping[str, int | None]
POSITIONS: Dims = dict.fromkeys(("img_ids", "txt_ids", "image_rotary_emb"))  # of a batch of ids diffusers takes the first item


class Known(NamedTuple):
    """A class whose sharded forward tests compare with one process.

    Args:
        order: order in which attention joins the streams; empty = separate cross-attention to text.
        table: entries beside those of the class's own `_cp_plan`.
        staged: its blocks can be divided into stages.
        items: see `item_dims`.
    """

    order: tuple[str, ...] = ()
    table: Table = MappingProxyType({})
    staged: bool = False
    items: Dims = MappingProxyType({})


@dataclass(frozen=True)
class _IfDims:
    """Splits a tensor that has the expected number of dimensions. Another one describes no tokens."""

    split: ContextParallelInput

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        return self.split(state, value, where) if isinstance(value, Tensor) and value.ndim == self.split.expected_dims else value


class _WholeMask:
    """Keeps a mask `[B, queries, keys]` or `[B, keys]` for the attention over all image or video tokens. The module gets one of
    this rank's tokens that hides nothing, since it fits masks to them."""

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if not isinstance(value, Tensor) or state.world_size == 1:
            return value
        state.whole_masks[(HIDDEN,), (HIDDEN,)] = value[(slice(None),) + (None,) * (4 - value.ndim)]
        own = state.layout((HIDDEN,)).local_lengths[state.rank]
        return value.new_zeros(value.shape[0], own, own)


class _Places:
    """Splits the places of tokens, behind tables in which they are looked up."""

    _split = ContextParallelInput(1, 2, streams=(HIDDEN,), side=True)

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        return value if value is None else (*value[:-1], self._split(state, value[-1], where))


class _Frames:
    """Notes the frames of a video `[B, channels, frames, rows, columns]`: its tokens are split inside each, since each attends to
    its own moment of a face. Refuses several moments in a frame."""

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 5:
            state.define(HIDDEN, value[0, 0].numel(), Split(value.shape[2]))
        elif (frames := state.layout((HIDDEN,)).splits[0].frames) % value.shape[1]:
            raise PlanError(
                f"{where}: got {value.shape[1]} moments of a face; allowed: {frames}, as there are frames, or a divisor. Pass four "
                "pictures of the face for each frame but the first."
            )
        return value


class _ShownText:
    """Notes how many tokens of text, which every rank has, a mask `[B, tokens]` shows of each item: items attend one by one,
    without the others."""

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            for item, shown in enumerate(value.count_nonzero(1).tolist()):
                text = ENCODER if not item else f"{ENCODER} {item}"
                state.define(text, shown, Split(replicated=True))
                state.in_turn.append(((HIDDEN, text), (HIDDEN, text)))
        return value


_TEXT_FIRST, _IMAGE_FIRST = (ENCODER, HIDDEN), (HIDDEN, ENCODER)


class _MaskOfText:
    """Splits a mask of text `[B, tokens]`, from which each attention makes one of this rank's text and image: 1 is added to scores
    of tokens that it shows. Theirs is made here of all tokens."""

    _split = ContextParallelInput(1, 2, streams=(ENCODER,))

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if isinstance(value, Tensor) and state.world_size > 1 and not state.whole_masks:
            shown = functional.pad(value.float(), (0, state.lengths[HIDDEN]), value=1.0)
            state.whole_masks[_TEXT_FIRST, _TEXT_FIRST] = (shown[:, None, :, None] * shown[:, None, None] > 0).float()
        return self._split(state, value, where)


_TOKENS, _TOKENS_OUT = ContextParallelInput(1, 3), ContextParallelInput(1, 4, split_output=True)
_POSITIONS_OUT = ContextParallelInput(0, 2, split_output=True)
_POSITIONS = ContextParallelInput(0, 2, streams=(HIDDEN,), side=True)
_IMAGE_POSITIONS = {"image_rotary_emb": _POSITIONS}
_OF_IMAGE = ContextParallelInput(1, 3, streams=(HIDDEN,))  # such as residuals of ControlNets, one or a list
_IDS = {"img_ids": ContextParallelInput(-2, streams=(HIDDEN,)), "txt_ids": ContextParallelInput(-2, streams=(ENCODER,))}
_RESIDUALS = {"controlnet_block_samples": _OF_IMAGE, "controlnet_single_block_samples": _OF_IMAGE}
_LIKE_FLUX = {HIDDEN: _TOKENS, ENCODER: _TOKENS, **_IDS}
_WHOLE_TEXT = ContextParallelInput(1, 3, streams=(ENCODER,), replicated=True)  # of models that cut it at its length
_WHOLE = ModulePlan(attention=())
_GATHERED = {"proj_out": ContextParallelOutput(1, 3)}
_JOINT = {"transformer_blocks.0": {HIDDEN: _TOKENS, ENCODER: _TOKENS}, **_GATHERED}
_COGVIEW = ModulePlan(inputs={**_IMAGE_POSITIONS, "attention_mask": _MaskOfText()})
_ROPE = {"rope": {0: _POSITIONS_OUT, 1: _POSITIONS_OUT}}
# Models that continue an image ("token_replace") modulate its tokens, the first of the video, apart: blocks get their number.
_FIRST_FRAME = ModulePlan(
    inputs={"num_tokens": TokenRanges(streams=(HIDDEN,))},
    when=lambda model, path: "num_tokens" in argument_positions(model.get_submodule(path)),
)
_KEYS = ContextParallelInput(2, 3, streams=(HIDDEN,), side=True)  # a row for all queries
_SIDE = ContextParallelInput(1, 3, streams=(HIDDEN,), side=True)
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
    "transformer_blocks.*": ModulePlan(inputs={"self_attention_mask": _WholeMask()}),
    "transformer_blocks.*.audio_attn1": _WHOLE,
    "transformer_blocks.*.audio_attn2": _WHOLE,
    "transformer_blocks.*.audio_to_video_attn": _WHOLE,
    "transformer_blocks.*.video_to_audio_attn": ModulePlan(attention=(AUDIO,), keys=(HIDDEN,)),
}
_IN_COMMON = (
    "timestep", "timestep_indices", "token_tags", "position_ids", "text_indices", "audio_indices", "video_indices",
)  # fmt: skip
CLASSES: Mapping[str, Known] = {
    "FluxTransformer2DModel": Known(_TEXT_FIRST, {"": {**_IDS, **_RESIDUALS}}, staged=True),
    "Flux2Transformer2DModel": Known(_TEXT_FIRST, {"": _IDS}),
    "QwenImageTransformer2DModel": Known(_TEXT_FIRST, {"": {"controlnet_block_samples": _OF_IMAGE}}, items={"img_shapes": 0}),
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
    "WanTransformer3DModel": Known(staged=True, items={"encoder_hidden_states_image": 0}),  # two rows for two pictures
    "ChronoEditTransformer3DModel": Known((), {"": {"timestep": ContextParallelInput(1, 2)}}),
    "HeliosTransformer3DModel": Known(),
    "LTXVideoTransformer3DModel": Known((), {"": {"timestep": _TOKEN_STEPS}}),
    "LTX2VideoTransformer3DModel": Known((), _LTX_2),
    # Noise levels that tokens refer to by index, and what all items have in common.
    "MiniMaxH3Transformer3DModel": Known(items=dict.fromkeys(_IN_COMMON)),
    "PixArtTransformer2DModel": Known(
        (),
        {
            "transformer_blocks.0": {HIDDEN: _TOKENS},
            "transformer_blocks.*": {"attention_mask": _KEYS, "encoder_attention_mask": _SIDE},
            **_GATHERED,
        },
        staged=True,
    ),
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
    # With a noise level per frame, tokens are modulated one by one, in the blocks and behind the last norm.
    "SkyReelsV2Transformer3DModel": Known(
        (),
        {
            **_WAN_ROPE,
            "blocks.0": {HIDDEN: _TOKENS},
            "blocks.*": ModulePlan(inputs={"temb": _IfDims(ContextParallelInput(2, 4, streams=(HIDDEN,), side=True))}),
            "norm_out": ContextParallelOutput(1, 3),
        },
    ),
    "WanVACETransformer3DModel": Known(
        (),
        {
            **_WAN_ROPE,
            "vace_blocks.0": {HIDDEN: _TOKENS, "control_hidden_states": _OF_IMAGE},
            "blocks.0": {HIDDEN: _TOKENS},
            **_GATHERED,
        },
        items={"control_hidden_states_scale": None},  # one number per layer
    ),
    "WanAnimateTransformer3DModel": Known(
        (),
        {
            "patch_embedding": ModulePlan(outputs={0: _Frames()}),
            "blocks.0": {HIDDEN: _TOKENS},
            "blocks.*": {"rotary_emb": ContextParallelInput(1, 4, streams=(HIDDEN,), side=True)},
            "face_adapter.*": ModulePlan(inputs={ENCODER: _Frames()}, attention=()),
            **_GATHERED,
        },
    ),
    "MochiTransformer3DModel": Known(
        _IMAGE_FIRST,
        {
            "time_embed": _WHOLE,
            "transformer_blocks.0": ModulePlan(inputs={HIDDEN: _OF_IMAGE, "encoder_attention_mask": _ShownText()}),
            "transformer_blocks.*": {"image_rotary_emb": ContextParallelInput(0, 3, streams=(HIDDEN,), side=True)},
            "transformer_blocks.*.attn1": ModulePlan(attention=_IMAGE_FIRST),
            **_GATHERED,
        },
    ),
    "AllegroTransformer3DModel": Known(
        (),
        {
            "transformer_blocks.0": {HIDDEN: _TOKENS},
            "transformer_blocks.*": ModulePlan(
                inputs={"attention_mask": _KEYS, "encoder_attention_mask": _SIDE, "image_rotary_emb": _Places()}
            ),
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
    "ChromaTransformer2DModel": Known(_TEXT_FIRST, {"": {**_LIKE_FLUX, **_RESIDUALS}, **_GATHERED}),
    "BriaTransformer2DModel": Known(_TEXT_FIRST, {"": {**_LIKE_FLUX, **_RESIDUALS}, **_GATHERED}),
    "BriaFiboTransformer2DModel": Known(
        _TEXT_FIRST, {"": {**_LIKE_FLUX, "text_encoder_layers": ContextParallelInput(1, 3, streams=(ENCODER,))}, **_GATHERED}
    ),
    "LongCatImageTransformer2DModel": Known(_TEXT_FIRST, {"": _LIKE_FLUX, **_GATHERED}),
    "OvisImageTransformer2DModel": Known(_TEXT_FIRST, {"": _LIKE_FLUX, **_GATHERED}),
    "CogView3PlusTransformer2DModel": Known(_TEXT_FIRST, _JOINT),
    "CogView4Transformer2DModel": Known(_TEXT_FIRST, {**_JOINT, "transformer_blocks.*": _COGVIEW}),
    "EasyAnimateTransformer3DModel": Known(_TEXT_FIRST, {**_JOINT, "transformer_blocks.*": _IMAGE_POSITIONS}),
    "GlmImageTransformer2DModel": Known(_TEXT_FIRST, {**_JOINT, "transformer_blocks.*": _COGVIEW}),
    "AuraFlowTransformer2DModel": Known(
        _TEXT_FIRST, {"joint_transformer_blocks.0": {HIDDEN: _TOKENS, ENCODER: _TOKENS}, **_GATHERED}
    ),
    "ConsisIDTransformer3DModel": Known(
        _TEXT_FIRST,
        {
            "transformer_blocks.0": {HIDDEN: _TOKENS, ENCODER: _WHOLE_TEXT},
            "transformer_blocks.*": _IMAGE_POSITIONS,
            **_GATHERED,
        },
    ),
    # The tokens of earlier frames are cut off behind the last block.
    "HunyuanVideoFramepackTransformer3DModel": Known(
        _IMAGE_FIRST,
        {
            "transformer_blocks.0": {HIDDEN: _TOKENS, ENCODER: _TOKENS},
            "transformer_blocks.*": {"freqs_cis": _POSITIONS},
            "single_transformer_blocks.*": _IMAGE_POSITIONS,
            "single_transformer_blocks.-1": [ContextParallelOutput(1, 3, stream=HIDDEN), None],
        },
        items=dict.fromkeys(f"indices_latents{of}" for of in ("", "_clean", "_history_2x", "_history_4x")),
    ),
    # A part of the text is another one in each block.
    "HiDreamImageTransformer2DModel": Known(
        _IMAGE_FIRST,
        {
            "double_stream_blocks.*": {
                HIDDEN: _TOKENS,
                ENCODER: _WHOLE_TEXT,
                "hidden_states_masks": ContextParallelInput(1, 2, streams=(HIDDEN,)),
                "image_rotary_emb": ContextParallelInput(1, 6, streams=_IMAGE_FIRST, side=True),
            },
            "single_stream_blocks.*": {
                "hidden_states_masks": ContextParallelInput(1, 2, streams=_IMAGE_FIRST),
                "image_rotary_emb": ContextParallelInput(1, 6, streams=_IMAGE_FIRST, side=True),
            },
            "double_stream_blocks.*.block.attn1": ModulePlan(attention=_IMAGE_FIRST),
            "single_stream_blocks.*.block.attn1": ModulePlan(attention=_IMAGE_FIRST),
            "final_layer": ContextParallelOutput(1, 3),
        },
        items={"encoder_hidden_states_llama3": 1},  # behind the layers of the text model
    ),
    # Text and image are one stream, and parted behind the last block.
    "Krea2Transformer2DModel": Known(
        (),
        {
            "transformer_blocks.0": {HIDDEN: _TOKENS},
            "transformer_blocks.*": _IMAGE_POSITIONS,
            "transformer_blocks.-1": ContextParallelOutput(1, 3),
        },
        items={"position_ids": None},
    ),
    "ZImageTransformer2DModel": Known(
        (),
        {
            "": {"controlnet_block_samples": ContextParallelInput(1, 3, streams=("x",))},
            "noise_refiner.*": _WHOLE,
            "context_refiner.*": _WHOLE,
            "layers.0": {"x": _TOKENS},
            "layers.*": {
                "freqs_cis": ContextParallelInput(1, 3, streams=("x",), side=True),
                "noise_mask": ContextParallelInput(1, 2, streams=("x",), side=True),
            },
            "all_final_layer.*": {"noise_mask": ContextParallelInput(1, 2, streams=("x",), side=True)},
            "all_final_layer.*.linear": ContextParallelOutput(1, 3),
        },
        items=dict.fromkeys(("x", "cap_feats", "siglip_feats", "image_noise_mask"), 0),
    ),
    # Video from frames has a noise level per frame, and tokens are modulated one by one.
    "CosmosTransformer3DModel": Known(
        (),
        {
            "transformer_blocks.0": {HIDDEN: _TOKENS},
            "transformer_blocks.*": ModulePlan(
                inputs={
                    **_IMAGE_POSITIONS,
                    "extra_pos_emb": _SIDE,
                    "temb": _IfDims(_SIDE),
                    "embedded_timestep": _IfDims(_SIDE),
                    "controlnet_residual": _OF_IMAGE,
                }
            ),
            "norm_out": ModulePlan(inputs={"temb": _IfDims(_SIDE), "embedded_timestep": _IfDims(_SIDE)}),
            **_GATHERED,
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


def item_dims(module: nn.Module, plan: ModulePlan | None) -> Dims:
    """Return the arguments whose items are not simply the rows of their tensors: the dimension that counts them, which is 0 for
    lists with an entry for each, or None where all items have them in common, however many rows there are."""
    inputs, found = plan.inputs if plan is not None else {}, known(module)
    tokens = (name for name, split in inputs.items() if getattr(split, "split_dim", None) == 0)
    return {**dict.fromkeys(tokens), **(POSITIONS if found else {}), **(found.items if found else {})}
