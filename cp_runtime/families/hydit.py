"""HunyuanDiT."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan

IMAGE = ("img",)

HUNYUAN_DIT = FamilyPlan(
    family="HunyuanDiT",
    model_class="comfy.ldm.hydit.models.HunYuanDiT",
    modules={
        "blocks.*": ModulePlan(
            inputs={
                "x": ContextParallelInput(split_dim=1, expected_dims=3, streams=IMAGE),
                "freq_cis_img": ContextParallelInput(split_dim=0, expected_dims=2, streams=IMAGE, side=True),
            },
            attention=IMAGE,
            local=("attn2",),
        ),
    },
    outputs={"final_layer": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="img")},
    control={"output": "img"},
    attention_names=("comfy.ldm.hydit.attn_layers.optimized_attention",),
)
