"""ACE-Step, Stable Audio Open and Stable Audio 3: one stream of sound.

ACE-Step 1 has linear attention over all tokens, and convolutions over three. In ACE-Step 1.5 every other layer attends to a window,
which only needs the tokens next to a rank's own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from ..engine.transforms import WithNeighbours, WithoutNeighbours
from ..errors import PlanError
from .family import FamilyPlan, gathered, side, tokens

AUDIO = ("audio",)
TOKENS = tokens(AUDIO)
WINDOW = 128

ACE_STEP = FamilyPlan(
    family="ACE-Step",
    model_class="comfy.ldm.ace.model.ACEStepTransformer2DModel",
    modules={
        "transformer_blocks.*": ModulePlan(inputs={"hidden_states": TOKENS}),
        # Its sums over tokens cannot be intercepted, and are cheap: every rank computes them over all tokens.
        "transformer_blocks.*.attn": ModulePlan(inputs={"hidden_states": WithNeighbours(stream="audio")}, outputs={0: TOKENS}),
        "transformer_blocks.*.cross_attn": ModulePlan(
            inputs={"cross_attention_kwargs.rotary_freqs_cis": side(AUDIO, dim=0, dims=2)}
        ),
        "transformer_blocks.*.ff": ModulePlan(
            inputs={"x": WithNeighbours(stream="audio", reach=1)}, outputs={0: WithoutNeighbours(stream="audio", reach=1)}
        ),
    },
    outputs={"transformer_blocks.-1": gathered("audio")},
)


def slides(model: nn.Module, path: str) -> bool:
    attention: Any = model.get_submodule(path)
    window = attention.sliding_window
    if window is not None and window > WINDOW:
        raise PlanError(f"ACE-Step 1.5 plan: {path} attends to a window of {window} tokens; the plan knows {WINDOW}")
    return window is not None


ACE_STEP_15 = FamilyPlan(
    family="ACE-Step 1.5",
    model_class="comfy.ldm.ace.ace_step15.AceStepConditionGenerationModel",
    modules={
        "decoder.layers.*": ModulePlan(
            inputs={"hidden_states": TOKENS, "position_embeddings": side(AUDIO, dim=0, dims=2)},
            attention=AUDIO,
            local=("cross_attn",),
        ),
        # The mask follows from distances between the local tokens, so it is right for any run of them.
        "decoder.layers.*.self_attn": ModulePlan(
            inputs={
                "hidden_states": WithNeighbours(stream="audio", reach=WINDOW),
                "position_embeddings": WithNeighbours(stream="audio", reach=WINDOW, dim=0, side=True),
            },
            outputs={0: WithoutNeighbours(stream="audio", reach=WINDOW)},
            attention=(),
            when=slides,
        ),
    },
    outputs={"decoder.layers.-1": gathered("audio")},
    attention_names=("comfy.ldm.ace.ace_step15.optimized_attention",),
    shares_batch=lambda arguments: False,  # the reference timbres of all items go to the first
)


def last_tokens(state: CallState, value: Any, where: str) -> Any:
    """Split per-token values of the last tokens, `[B, count, ...]`: the module puts zeros in front of a rank's part."""
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
    # Before memory tokens and prepended ones are cut off.
    outputs={"transformer.layers.-1": gathered("audio")},
)
