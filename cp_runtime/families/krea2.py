"""Krea 2: text and image in one stream, in-context references."""

from ..engine.plan import ModulePlan
from ..engine.transforms import TokenRanges
from .family import FamilyPlan, gathered, side, tokens

KREA2 = FamilyPlan(
    family="Krea 2",
    model_class="comfy.ldm.krea2.model.SingleStreamDiT",
    modules={
        "blocks.*": ModulePlan(
            inputs={
                "x": tokens("all"),
                "freqs": side("all", dim=2, dims=6),
                "timestep_zero_index": TokenRanges(streams=("all",)),
            },
            attention=("all",),
        ),
    },
    outputs={"last": gathered("all")},
)
