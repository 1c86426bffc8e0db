"""PixArt alpha and sigma."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan

IMAGE = ("img",)

PIXART = FamilyPlan(
    family="PixArt",
    model_class="comfy.ldm.pixart.pixartms.PixArtMS",
    modules={
        "blocks.*": ModulePlan(
            inputs={"x": ContextParallelInput(split_dim=1, expected_dims=3, streams=IMAGE)},
            attention=IMAGE,
            local=("cross_attn",),
        ),
    },
    outputs={"final_layer": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="img")},
    attention_names=("comfy.ldm.pixart.blocks.optimized_attention",),
)
