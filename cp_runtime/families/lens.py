"""Lens."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, side, tokens

JOINT = ("img", "txt")

LENS = FamilyPlan(
    family="Lens",
    model_class="comfy.ldm.lens.model.LensTransformer2DModel",
    modules={
        "transformer_blocks.*": ModulePlan(
            inputs={
                "hidden_states": tokens("img"),
                "encoder_hidden_states": tokens("txt"),
                "freqs_cis": side(JOINT, dim=2, dims=6),
                # The block insists on one column per token that it has.
                "attention_mask": side(JOINT, dim=3, dims=4),
            },
            attention=JOINT,
        ),
    },
    outputs={"proj_out": gathered("img")},
    control={"input": "img"},
)
