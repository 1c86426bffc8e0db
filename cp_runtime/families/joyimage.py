"""JoyImage, also with reference images."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, side, tokens

JOYIMAGE = FamilyPlan(
    family="JoyImage",
    model_class="comfy.ldm.joyimage.model.JoyImageTransformer3DModel",
    modules={
        "double_blocks.*": ModulePlan(
            inputs={
                "hidden_states": tokens("img"),
                "encoder_hidden_states": tokens("txt"),
                "image_rotary_emb": side("img", dim=1, dims=6),
            },
            attention=("img", "txt"),
        ),
    },
    # The image tokens before the references are taken by their absolute position.
    outputs={"double_blocks.-1": gathered("img")},
)
