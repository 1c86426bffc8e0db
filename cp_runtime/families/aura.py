"""AuraFlow."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, tokens

JOINT = ("txt", "img")

AURA_FLOW = FamilyPlan(
    family="AuraFlow",
    model_class="comfy.ldm.aura.mmdit.MMDiT",
    modules={
        "double_layers.*": ModulePlan(inputs={"c": tokens("txt"), "x": tokens("img")}, attention=JOINT),
        "single_layers.*": ModulePlan(attention=JOINT),
    },
    outputs={"final_linear": gathered("img")},
)
