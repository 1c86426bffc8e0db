"""HunyuanDiT."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, side, tokens

HUNYUAN_DIT = FamilyPlan(
    family="HunyuanDiT",
    model_class="comfy.ldm.hydit.models.HunYuanDiT",
    modules={
        "blocks.*": ModulePlan(
            inputs={"x": tokens("img"), "freq_cis_img": side("img", dim=0, dims=2)},
            attention=("img",),
            local=("attn2",),
        ),
    },
    outputs={"final_layer": gathered("img")},
    control={"output": "img"},
    attention_names=("comfy.ldm.hydit.attn_layers.optimized_attention",),
)
