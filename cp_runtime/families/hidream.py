"""HiDream-I1 and E1."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, side, tokens

JOINT = ("img", "txt")
ROPE = side(JOINT, dim=1, dims=6)

HIDREAM = FamilyPlan(
    family="HiDream-I1",
    model_class="comfy.ldm.hidream.model.HiDreamImageTransformer2DModel",
    modules={
        "double_stream_blocks.*": ModulePlan(
            # Every block puts its own text behind the tokens, and cuts it off again by its length: it stays whole.
            inputs={"image_tokens": tokens("img"), "text_tokens": tokens("txt", replicated=True), "rope": ROPE},
            attention=JOINT,
        ),
        "single_stream_blocks.*": ModulePlan(inputs={"rope": ROPE}, attention=JOINT),
    },
    outputs={"final_layer": gathered("img")},
)
