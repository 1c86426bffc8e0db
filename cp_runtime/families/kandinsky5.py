"""Kandinsky 5: text to image, text and image to video."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan

VISUAL = ("visual",)

KANDINSKY5 = FamilyPlan(
    family="Kandinsky 5",
    model_class="comfy.ldm.kandinsky5.model.Kandinsky5",
    modules={
        "visual_transformer_blocks.*": ModulePlan(
            inputs={
                "visual_embed": ContextParallelInput(split_dim=1, expected_dims=3, streams=VISUAL),
                "freqs": ContextParallelInput(split_dim=1, expected_dims=6, streams=VISUAL, side=True),
            },
            attention=VISUAL,
            local=("cross_attention",),
        ),
    },
    # The output layer takes frames, rows and columns.
    outputs={"visual_transformer_blocks.-1": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="visual")},
)
