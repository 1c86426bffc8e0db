"""Cosmos Predict2: text to image, image to video; and Anima."""

from dataclasses import replace

from ..engine.plan import ModulePlan
from ..engine.transforms import GridInput
from .family import FamilyPlan, gathered, side

VIDEO = ("video",)

COSMOS_PREDICT2 = FamilyPlan(
    family="Cosmos Predict2",
    model_class="comfy.ldm.cosmos.predict2.MiniTrainDIT",
    modules={
        "blocks.*": ModulePlan(
            inputs={
                "x_B_T_H_W_D": GridInput(stream="video"),
                "rope_emb_L_1_1_D": side(VIDEO, dim=1, dims=6),
                "extra_per_block_pos_emb": GridInput(stream="video", side=True),
            },
            attention=VIDEO,
            local=("cross_attn",),
        ),
    },
    outputs={"final_layer": gathered("video", dims=5)},
)
# Its text encoder runs before the sharded forward.
ANIMA = replace(COSMOS_PREDICT2, family="Anima", model_class="comfy.ldm.anima.model.Anima")
