"""PixArt alpha and sigma."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, tokens

PIXART = FamilyPlan(
    family="PixArt",
    model_class="comfy.ldm.pixart.pixartms.PixArtMS",
    modules={"blocks.*": ModulePlan(inputs={"x": tokens("img")}, attention=("img",), local=("cross_attn",))},
    outputs={"final_layer": gathered("img")},
    attention_names=("comfy.ldm.pixart.blocks.optimized_attention",),
)
