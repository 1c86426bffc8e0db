"""Stable Diffusion 3 and 3.5."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, tokens

JOINT, IMAGE = ("txt", "img"), ("img",)

SD3 = FamilyPlan(
    family="SD3",
    model_class="comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
    modules={"joint_blocks.*": ModulePlan(inputs={"args[0]": tokens("txt"), "args[1]": tokens("img")})},
    outputs={"final_layer": gathered("img")},
    # SD3.5 medium attends twice in a block: over both streams, and over the image alone. Every rank has a text token, so the
    # number of queries tells which.
    attention=((JOINT, JOINT), (IMAGE, IMAGE)),
    control={"output": "img"},
)
