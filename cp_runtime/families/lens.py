"""Lens."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan

JOINT = ("img", "txt")

LENS = FamilyPlan(
    family="Lens",
    model_class="comfy.ldm.lens.model.LensTransformer2DModel",
    modules={
        "transformer_blocks.*": ModulePlan(
            inputs={
                "hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, streams=("img",)),
                "encoder_hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, streams=("txt",)),
                "freqs_cis": ContextParallelInput(split_dim=2, expected_dims=6, streams=JOINT, side=True),
                # The block insists on one column per token that it has.
                "attention_mask": ContextParallelInput(split_dim=3, expected_dims=4, streams=JOINT, side=True),
            },
            attention=JOINT,
        ),
    },
    outputs={"proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="img")},
    control={"input": "img"},
)
