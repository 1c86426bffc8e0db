"""Mochi 1: text to video."""

from typing import Any

from ..engine.plan import ModulePlan
from ..engine.sharding import Split
from ..engine.state import CallState
from .family import FamilyPlan, gathered, side, tokens

JOINT = ("img", "txt")


def text_crop(state: CallState, value: Any, where: str) -> Any:
    """Define the text tokens that take part in attention: the first ones of those that a block is called with."""
    state.define("txt", min(int(value), state.lengths["all txt"]), Split(replicated=True))
    return value


ROPE = side("img", dim=0, dims=3)

MOCHI = FamilyPlan(
    family="Mochi",
    model_class="comfy.ldm.genmo.joint_model.asymm_models_joint.AsymmDiTJoint",
    modules={
        "blocks.*": ModulePlan(inputs={"x": tokens("img"), "y": tokens("all txt", replicated=True)}),
        "blocks.*.attn": ModulePlan(
            inputs={"crop_y": text_crop, "rope_rotation.rope_cos": ROPE, "rope_rotation.rope_sin": ROPE},
            attention=JOINT,
        ),
    },
    outputs={"final_layer": gathered("img")},
)
