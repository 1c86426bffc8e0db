"""Stable Audio Open and Stable Audio 3."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from ..engine.transforms import WithNeighbours
from .family import FamilyPlan, gathered, side, tokens

AUDIO = ("audio",)
TOKENS = tokens(AUDIO)


def last_tokens(state: CallState, value: Any, where: str) -> Any:
    """Split a value per token for the last tokens, `[B, count, ...]`: the module puts zeros in front of a rank's part."""
    if not isinstance(value, Tensor) or state.world_size == 1:
        return value
    layout = state.layout(AUDIO)
    start, stop = (max(0, edge - layout.total + value.shape[1]) for edge in layout.window(state.rank))
    return state.once(last_tokens, value, lambda: value[:, start:stop])


def takes_mean(model: nn.Module, path: str) -> bool:
    """Return whether a module's attention scales its output around the mean over all tokens."""
    return bool(model.get_submodule(path.rpartition(".")[0]).feat_scale)


SCALED = ModulePlan(outputs={0: WithNeighbours(stream="audio")}, when=takes_mean)
STABLE_AUDIO = FamilyPlan(
    family="Stable Audio",
    model_class="comfy.ldm.audio.dit.AudioDiffusionTransformer",
    modules={
        "transformer.layers.*": ModulePlan(
            inputs={"x": TOKENS, "rotary_pos_emb": side(AUDIO, dim=0, dims=2), "local_add_cond": last_tokens},
            attention=AUDIO,
            local=("cross_attn",),
        ),
        "transformer.layers.*.self_attn": ModulePlan(outputs={0: TOKENS}),
        "transformer.layers.*.self_attn.to_out": SCALED,
        "transformer.layers.*.cross_attn": ModulePlan(outputs={0: TOKENS}),
        "transformer.layers.*.cross_attn.to_out": SCALED,
    },
    # Before memory tokens and what was prepended are cut off.
    outputs={"transformer.layers.-1": gathered("audio")},
)
