"""CogVideoX 1.0 and 1.5: text to video, image to video, inpainting."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, side, tokens

COGVIDEOX = FamilyPlan(
    family="CogVideoX",
    model_class="comfy.ldm.cogvideo.model.CogVideoXTransformer3DModel",
    modules={
        "blocks.*": ModulePlan(
            inputs={
                "encoder_hidden_states": tokens("txt"),
                "hidden_states": tokens("video"),
                "image_rotary_emb": side("video", dim=0, dims=2),
            },
            attention=("txt", "video"),
        ),
    },
    outputs={"proj_out": gathered("video")},
)
