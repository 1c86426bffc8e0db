"""HiDream-O1: text and reference images to image, in pixels."""

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..engine.plan import ModulePlan
from ..engine.ranks.sharding import Split
from ..engine.state import CallState
from .family import FamilyPlan, gathered

# The first tokens attend to each other causally, in a separate attention. The model caches their keys and values for later steps,
# which run without them: whole on every rank. "prefix" counts those among a block's tokens: all or none.
KEYS = ("kept", "generated")
TOKENS = ("prefix", "generated")
REMEMBERED = 8  # tensors while the plan is installed: more than the model keeps keys for


def kept_keys(state: CallState, value: Any, where: str) -> Any:
    """Define the first tokens, whose keys and values may be cached from an earlier step: (keys, values, number), or () or None."""
    kept, everywhere = max(0, int(state.arguments["ar_len"])), Split(replicated=True)
    state.define("kept", kept, everywhere)
    state.define("prefix", 0 if value else kept, everywhere)
    return value


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Split a tensor (or several) with all tokens of a block, `[..., tokens, D]`. `side`: every block gets the same one."""

    side: bool = False

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if isinstance(value, tuple):
            return tuple(self(state, item, where) for item in value)
        state.define("generated", value.shape[-2] - state.lengths["prefix"])
        layout = state.layout(TOKENS)
        if value.shape[-2] != layout.total:
            return value
        make = partial(layout.take_local, value, state.rank, -2)
        return state.once(self, value, make) if self.side else make()


def same_object(state: CallState, value: Any, where: str) -> Any:
    """Return the same tensor object for equal values: the model identifies its cached keys by the reference images' identity."""
    if value is None:
        return None
    seen = state.kept.setdefault(same_object, deque(maxlen=REMEMBERED))
    for tensor in seen:
        if tensor.shape == value.shape and torch.equal(tensor, value):
            return tensor
    seen.append(value)
    return value


HIDREAM_O1 = FamilyPlan(
    family="HiDream-O1",
    model_class="comfy.ldm.hidream_o1.model.HiDreamO1Transformer",
    unstaged="its blocks keep keys and values for later steps, and skipped blocks keep none",
    shares_batch=lambda arguments: False,  # every item uses the text, the references and the cached keys of the first
    modules={
        "": ModulePlan(inputs={"kwargs.ref_pixel_values": same_object}),
        "language_model.layers.*": ModulePlan(
            inputs={"past_key_value": kept_keys, "x": Tokens(), "freqs_cis": Tokens(side=True)},
            attention=("generated",),
            keys=KEYS,
        ),
    },
    outputs={"language_model.norm": gathered(TOKENS)},
)
