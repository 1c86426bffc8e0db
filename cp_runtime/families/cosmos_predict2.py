"""Cosmos Predict2: text to image, image to video."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput, GridInput
from .family import FamilyPlan

VIDEO = ("video",)

COSMOS_PREDICT2 = FamilyPlan(
    family="Cosmos Predict2",
    model_class="comfy.ldm.cosmos.predict2.MiniTrainDIT",
    modules={
        "blocks.*": ModulePlan(
            inputs={
                "x_B_T_H_W_D": GridInput(stream="video"),
                "rope_emb_L_1_1_D": ContextParallelInput(split_dim=1, expected_dims=6, streams=VIDEO, side=True),
                "extra_per_block_pos_emb": GridInput(stream="video", side=True),
            },
            attention=VIDEO,
            local=("cross_attn",),
        ),
    },
    outputs={"final_layer": ContextParallelOutput(gather_dim=1, expected_dims=5, stream="video")},
)
