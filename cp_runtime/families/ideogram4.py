"""Ideogram 4: text and image in one stream, masked by segments."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, side, tokens

IDEOGRAM4 = FamilyPlan(
    family="Ideogram 4",
    model_class="comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel",
    modules={
        "layers.*": ModulePlan(inputs={"x": tokens("all"), "freqs_cis": side("all", dim=1, dims=6)}, attention=("all",)),
    },
    outputs={"final_layer": gathered("all")},
)
