"""Krea 2: text and image in one stream, in-context references."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput, TokenIndex
from .family import FamilyPlan

ALL = ("all",)

KREA2 = FamilyPlan(
    family="Krea 2",
    model_class="comfy.ldm.krea2.model.SingleStreamDiT",
    modules={
        "blocks.*": ModulePlan(
            inputs={
                "x": ContextParallelInput(split_dim=1, expected_dims=3, streams=ALL),
                "freqs": ContextParallelInput(split_dim=2, expected_dims=6, streams=ALL, side=True),
                "timestep_zero_index": TokenIndex(stream="all"),
            },
            attention=ALL,
        ),
    },
    outputs={"last": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="all")},
)
