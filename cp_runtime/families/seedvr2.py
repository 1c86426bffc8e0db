"""SeedVR2: every rank computes the attention, within windows of different sizes; work per token is shared."""

from __future__ import annotations

from typing import Any

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from ..engine.transforms import WithNeighbours
from .family import FamilyPlan, gathered, tokens

TOKENS = tokens("video", dim=0, dims=2)


def local_counts(state: CallState, value: Any, where: str) -> Any:
    """Return the number of tokens of every item (video and text), one after the other in the stream, on a rank."""
    if state.world_size == 1:
        return value
    start, stop = state.layout(("video",)).window(state.rank)
    ends = value.vid.cumsum(0).clamp(start, stop)
    return type(value)(ends.diff(prepend=ends.new_full((1,), start)), value.txt)


SEEDVR2 = FamilyPlan(
    family="SeedVR2",
    model_class="comfy.ldm.seedvr.model.NaDiT",
    unstaged="its blocks keep the lengths of windows for the next ones, and skipped blocks keep none",
    modules={
        "blocks.*": ModulePlan(inputs={"vid": TOKENS}),
        "blocks.*.ada": ModulePlan(inputs={"kwargs.hid_len": local_counts}),
        "blocks.*.attn.proj_qkv": ModulePlan(outputs={0: WithNeighbours(stream="video", dim=0)}),
        "blocks.*.attn.proj_out": ModulePlan(inputs={"vid": TOKENS}),
    },
    # Before the patches are put together.
    outputs={"vid_out.proj": gathered("video", dim=0, dims=2)},
    shares_batch=lambda arguments: False,  # ComfyUI takes queries and keys of every text from repetitions of the first
)
