"""Kandinsky 5: text to image, text and image to video."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, side, tokens

KANDINSKY5 = FamilyPlan(
    family="Kandinsky 5",
    model_class="comfy.ldm.kandinsky5.model.Kandinsky5",
    modules={
        "visual_transformer_blocks.*": ModulePlan(
            inputs={"visual_embed": tokens("visual"), "freqs": side("visual", dim=1, dims=6)},
            attention=("visual",),
            local=("cross_attention",),
        ),
    },
    # The output layer takes frames, rows and columns.
    outputs={"visual_transformer_blocks.-1": gathered("visual")},
)
