"""HiDream-I1 and E1."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan

JOINT = ("img", "txt")
ROPE = ContextParallelInput(split_dim=1, expected_dims=6, streams=JOINT, side=True)

HIDREAM = FamilyPlan(
    family="HiDream-I1",
    model_class="comfy.ldm.hidream.model.HiDreamImageTransformer2DModel",
    modules={
        "double_stream_blocks.*": ModulePlan(
            inputs={
                "image_tokens": ContextParallelInput(split_dim=1, expected_dims=3, streams=("img",)),
                # Every block puts its own text behind the tokens, and cuts it off again by its length.
                "text_tokens": ContextParallelInput(split_dim=1, expected_dims=3, streams=("txt",), replicated=True),
                "rope": ROPE,
            },
            attention=JOINT,
        ),
        "single_stream_blocks.*": ModulePlan(inputs={"rope": ROPE}, attention=JOINT),
    },
    outputs={"final_layer": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="img")},
)
