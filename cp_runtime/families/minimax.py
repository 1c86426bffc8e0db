"""MiniMax H3: text, key frames and references to video with sound."""

from dataclasses import dataclass
from typing import Any

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from ..engine.transforms import TokenRanges
from .family import FamilyPlan, gathered, side, tokens

JOINT = ("given", "audio", "video")
TOKENS = tokens(JOINT, dim=0, dims=2)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Split all tokens, `[tokens, D]`: text and references, then the audio and video that are denoised."""

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        video, audio = state.arguments["x"]
        state.define("video", video.shape[2] * -(-video.shape[3] // 2) * -(-video.shape[4] // 2))
        state.define("audio", audio.shape[2] * audio.shape[3])
        return TOKENS(state, value, where)


MINIMAX = FamilyPlan(
    family="MiniMax H3",
    model_class="comfy.ldm.minimax.model.MiniMaxH3Model",
    modules={
        "blocks.*": ModulePlan(
            inputs={
                "x": Packed(),
                "mod_segments": TokenRanges(streams=JOINT),
                "rope_freqs": side(JOINT, dim=1, dims=6),
            },
            attention=JOINT,
        ),
        "final_layer": ModulePlan(inputs={"video_seg": TokenRanges(streams=JOINT), "audio_seg": TokenRanges(streams=JOINT)}),
    },
    rebuilt=("minimax_payload.layout",),
    outputs={"final_layer": [gathered(name, dim=0, dims=2) for name in ("video", "audio")]},
)
