"""JoyImage, also with reference images."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan

JOINT = ("img", "txt")

JOYIMAGE = FamilyPlan(
    family="JoyImage",
    model_class="comfy.ldm.joyimage.model.JoyImageTransformer3DModel",
    modules={
        "double_blocks.*": ModulePlan(
            inputs={
                "hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, streams=("img",)),
                "encoder_hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, streams=("txt",)),
                "image_rotary_emb": ContextParallelInput(split_dim=1, expected_dims=6, streams=("img",), side=True),
            },
            attention=JOINT,
        ),
    },
    # The image tokens before the references are taken by their absolute position.
    outputs={"double_blocks.-1": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="img")},
)
