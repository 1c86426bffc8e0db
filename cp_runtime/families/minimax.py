"""MiniMax H3: text, key frames and references to video with sound."""

from typing import Any

from ..engine.plan import ModulePlan
from ..engine.state import CallState
from ..engine.transforms import TokenRanges
from .family import FamilyPlan, gathered, side, tokens

JOINT = ("given", "audio", "video")
TOKENS, RANGES = tokens(JOINT, dim=0, dims=2), TokenRanges(streams=JOINT)


def packed(state: CallState, value: Any, where: str) -> Any:
    """Split all tokens, `[tokens, D]`: text and references, then the noisy audio and video."""
    video, audio = state.arguments["x"]
    # Patches of 2 × 2, to which the model pads rows and columns.
    state.define("video", video.shape[2] * -(-video.shape[3] // 2) * -(-video.shape[4] // 2))
    state.define("audio", audio.shape[2] * audio.shape[3])
    return TOKENS(state, value, where)


MINIMAX = FamilyPlan(
    family="MiniMax H3",
    model_class="comfy.ldm.minimax.model.MiniMaxH3Model",
    modules={
        "blocks.*": ModulePlan(
            inputs={"x": packed, "mod_segments": RANGES, "rope_freqs": side(JOINT, dim=1, dims=6)}, attention=JOINT
        ),
        "final_layer": ModulePlan(inputs={"video_seg": RANGES, "audio_seg": RANGES}),
    },
    rebuilt=("minimax_payload.layout",),
    outputs={"final_layer": [gathered(name, dim=0, dims=2) for name in ("video", "audio")]},
)
