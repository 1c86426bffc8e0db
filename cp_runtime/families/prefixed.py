"""Text and references first, which no token of the result changes: Qwen-Image 2.1, SenseNova U1.5, YuE2."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from .family import FamilyPlan, gathered, side, tokens

PREFIX, IMAGE, AUDIO = ("prefix",), ("img",), ("audio",)

# Qwen-Image 2.1 has texts and references in turn, then the image. Each attends to itself and to all before it, a text causally.


def segments(state: CallState, value: list[tuple[int, int, Tensor | None]], where: str) -> Any:
    """Make a stream of every (start, end, mask), so that all ranks have a part of each; return them by this rank's numbers."""
    names: tuple[str, ...] = ()
    local = []
    for start, end, mask in value:
        name = "img" if end == value[-1][1] else f"prefix {len(names)}"
        names += (name,)
        state.define(name, end - start)
        state.in_turn.append(((name,), names))
        own, seen = (state.layout(streams).local_lengths[state.rank] for streams in ((name,), names))
        local.append((seen - own, seen, mask))
    return local


def sequence(state: CallState, value: Tensor, where: str) -> Tensor:
    """Split a tensor about all tokens: the image, which comes last, attends to them."""
    layout = state.layout(state.in_turn[-1][1])
    return layout.take_local(value, state.rank, 1) if value.shape[1] == layout.total else value


def positions(state: CallState, value: Tensor, where: str) -> Tensor:
    """Split the positions, once for all blocks."""
    return state.once(positions, value, lambda: sequence(state, value, where))  # type: ignore[no-any-return]


def prefix_length(state: CallState, value: int, where: str) -> int:
    """Replace the number of tokens before the image by that of this rank's."""
    return state.layout(state.in_turn[-1][1][:-1]).local_lengths[state.rank]


def behind_room(state: CallState, value: Tensor, where: str) -> Tensor:
    """Put this rank's part of the image behind as many zeros as there are tokens before it: so many does the model cut off."""
    prefix, own = state.layout(state.in_turn[-1][1][:-1]), state.layout(IMAGE).local_lengths[state.rank]
    return F.pad(value[:, value.shape[1] - own :], (0, 0, prefix.total, 0))


def without_cache(state: CallState, value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Let no rank keep keys and values for the next step: each would decide by its own free memory."""
    return {**value, "device": "off"}


QWEN_IMAGE_21 = FamilyPlan(
    family="Qwen-Image 2.1",
    model_class="comfy.ldm.qwen_image21.model.QwenImage21Transformer2DModel",
    since="0.37.0",
    unstaged="it divides its tokens before the blocks, for all of them",
    modules={
        ":build_sequence": ModulePlan(outputs={2: segments}),
        ":select_prefix_cache": ModulePlan(inputs={"options": without_cache}),
        "transformer_blocks.*": ModulePlan(inputs={"x": sequence, "pe": positions, "prefix_len": prefix_length}, attention=IMAGE),
        "transformer_blocks.-1": ModulePlan(outputs={0: behind_room}),
    },
    outputs={"proj_out": gathered("img")},
)

# SenseNova U1.5 may get the prefix as keys and values, of which each rank takes a part.
HEADS_FIRST = tokens(PREFIX, dim=2, dims=4)

SENSENOVA = FamilyPlan(
    family="SenseNova U1.5",
    model_class="comfy.ldm.sensenova.model.SenseNovaU15",
    since="0.36.0",
    unstaged="the model calls other methods of its blocks than forward",
    modules={
        "language_model.model.layers.*:forward_prefix": ModulePlan(
            inputs={"prefix": tokens(PREFIX), "prefix_rope": side(PREFIX, dim=2, dims=4)}, attention=PREFIX
        ),
        "language_model.model.layers.*:forward_generation": ModulePlan(
            inputs={
                "image": tokens(IMAGE),
                "image_rope": side(IMAGE, dim=2, dims=4),
                "prefix_key": HEADS_FIRST,
                "prefix_value": HEADS_FIRST,
            },
            attention=IMAGE,
            keys=(*PREFIX, *IMAGE),
        ),
    },
    outputs={"language_model.model.norm_mot_gen": gathered("img")},
)

# YuE2 computes the chunks of a song one after the other. The prefix of each comes as keys and values.


def next_chunk(state: CallState, value: Any, where: str) -> Any:
    state.restart()
    return value


def past(state: CallState, value: tuple[Tensor, Tensor, int], where: str) -> tuple[Tensor, Tensor, int]:
    """Split (keys, values, number of tokens) of a prefix."""
    keys, values = HEADS_FIRST(state, value[:2], where)
    return keys, values, keys.shape[2]


YUE2 = FamilyPlan(
    family="YuE2",
    model_class="comfy.ldm.yue2.model.YuE2",
    since="0.36.0",
    modules={
        "vae2llm": ModulePlan(outputs={0: next_chunk}),
        "model.layers.*": ModulePlan(
            inputs={"past_key_value": past, "x": tokens(AUDIO), "freqs_cis": side(AUDIO, dim=2, dims=4)},
            attention=AUDIO,
            keys=(*PREFIX, *AUDIO),
        ),
    },
    outputs={"llm2vae": gathered("audio")},
    attention_names=("comfy.ldm.yue2.model.optimized_attention_for_device()",),
)
