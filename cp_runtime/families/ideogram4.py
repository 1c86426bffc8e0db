"""Ideogram 4: text and image in one stream, masked by segments."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan

ALL = ("all",)

IDEOGRAM4 = FamilyPlan(
    family="Ideogram 4",
    model_class="comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel",
    modules={
        "layers.*": ModulePlan(
            inputs={
                "x": ContextParallelInput(split_dim=1, expected_dims=3, streams=ALL),
                "freqs_cis": ContextParallelInput(split_dim=1, expected_dims=6, streams=ALL, side=True),
            },
            attention=ALL,
        ),
    },
    outputs={"final_layer": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="all")},
)
