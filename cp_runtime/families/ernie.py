"""ERNIE-Image."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan

TOKENS = ("tokens",)

ERNIE_IMAGE = FamilyPlan(
    family="ERNIE-Image",
    model_class="comfy.ldm.ernie.model.ErnieImageModel",
    modules={
        "layers.*": ModulePlan(
            inputs={
                "x": ContextParallelInput(split_dim=1, expected_dims=3, streams=TOKENS),
                "rotary_pos_emb": ContextParallelInput(split_dim=1, expected_dims=6, streams=TOKENS, side=True),
            },
            attention=TOKENS,
        ),
    },
    outputs={"final_linear": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="tokens")},
    attention_names=("comfy.ldm.ernie.model.optimized_attention",),
)
