"""ERNIE-Image: text and image in one stream."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, side, tokens

ERNIE_IMAGE = FamilyPlan(
    family="ERNIE-Image",
    model_class="comfy.ldm.ernie.model.ErnieImageModel",
    modules={
        "layers.*": ModulePlan(
            inputs={"x": tokens("tokens"), "rotary_pos_emb": side("tokens", dim=1, dims=6)}, attention=("tokens",)
        ),
    },
    outputs={"final_linear": gathered("tokens")},
    attention_names=("comfy.ldm.ernie.model.optimized_attention",),
)
