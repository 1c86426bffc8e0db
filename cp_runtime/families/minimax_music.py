"""MiniMax Music 3: windows of a song one after the other, each with tokens of its own behind one for the time."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, side, tokens

AUDIO = ("audio",)
TRANSFORMER = "diffusion_transformer.transformer"
MINIMAX_MUSIC = FamilyPlan(
    family="MiniMax Music 3",
    model_class="comfy.ldm.minimax_music.dit.MiniMaxMusic3DiT",
    since="0.33.0",
    modules={
        TRANSFORMER: ModulePlan(separate=True),
        f"{TRANSFORMER}.layers.*": ModulePlan(
            inputs={"x": tokens(AUDIO), "rotation_matrix": side(AUDIO, dim=2, dims=6)}, attention=AUDIO
        ),
    },
    # Before the token for the time is cut off.
    outputs={f"{TRANSFORMER}.layers.-1": gathered("audio")},
    attention_names=("comfy.ldm.minimax_music.dit.optimized_attention_for_device()",),
)
