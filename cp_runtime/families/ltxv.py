"""LTX-Video: text and image to video, keyframes, guides with a strength of their own."""

import copy
from dataclasses import dataclass
from typing import Any

from torch.nn import functional as F

from ..engine.plan import ModulePlan
from ..engine.sharding import CONTIGUOUS, Split
from ..engine.state import CallState
from .family import FamilyPlan, gathered, side

# Attenuated guides make the model attend with a part of its queries at a time, all tokens before the guides first. So that every
# rank has some of both parts, each is a stream of its own. Without attenuation there are no guides: all tokens are "noisy".
VIDEO = ("noisy", "guides")


@dataclass(frozen=True, kw_only=True)
class GuidedVideo:
    """Split video tokens `[B, tokens, D]`, guides last.

    Args:
        per_frame: split inside each frame of the latent, if the tokens are whole frames.
    """

    per_frame: bool = False

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        self.define(state, value.shape[1], 0)
        layout = state.layout(VIDEO)
        return value if value.shape[1] != layout.total else layout.take_local(value, state.rank, 1)

    def define(self, state: CallState, noisy: int, guides: int) -> None:
        """Define the lengths of both streams, unless they are known."""
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
    """Localise ComfyUI's GuideAttentionMask, which knows where guides begin.

    Args:
        video: the tokens that it is about.
    """

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
