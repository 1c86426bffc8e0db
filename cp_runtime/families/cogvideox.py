"""CogVideoX 1.0 and 1.5: text to video, image to video, inpainting."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan

COGVIDEOX = FamilyPlan(
    family="CogVideoX",
    model_class="comfy.ldm.cogvideo.model.CogVideoXTransformer3DModel",
    modules={
        "blocks.*": ModulePlan(
            inputs={
                "encoder_hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, streams=("txt",)),
                "hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, streams=("video",)),
                "image_rotary_emb": ContextParallelInput(split_dim=0, expected_dims=2, streams=("video",), side=True),
            },
            attention=("txt", "video"),
        ),
    },
    outputs={"proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="video")},
)
