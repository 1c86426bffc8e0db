"""AuraFlow."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan

JOINT = ("txt", "img")

AURA_FLOW = FamilyPlan(
    family="AuraFlow",
    model_class="comfy.ldm.aura.mmdit.MMDiT",
    modules={
        "double_layers.*": ModulePlan(
            inputs={
                "c": ContextParallelInput(split_dim=1, expected_dims=3, streams=("txt",)),
                "x": ContextParallelInput(split_dim=1, expected_dims=3, streams=("img",)),
            },
            attention=JOINT,
        ),
        "single_layers.*": ModulePlan(attention=JOINT),
    },
    outputs={"final_linear": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="img")},
)
