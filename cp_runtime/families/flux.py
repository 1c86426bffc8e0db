"""Flux 1, Kontext, Flux 2 and the models that share their class."""

from ..engine.plan import ModulePlan
from ..engine.transforms import TokenRanges
from .family import FamilyPlan, gathered, side, tokens

JOINT = ("txt", "img")
PE = side(JOINT, dim=2, dims=6)
DOUBLE_BLOCK = ModulePlan(
    inputs={"txt": tokens("txt"), "img": tokens("img"), "pe": PE, "modulation_dims_img": TokenRanges(streams=("img",))},
    attention=JOINT,
)
SINGLE_BLOCK = ModulePlan(inputs={"pe": PE, "modulation_dims": TokenRanges(streams=("img",), after="txt")}, attention=JOINT)
BLOCKS = {"double_blocks.*": DOUBLE_BLOCK, "single_blocks.*": SINGLE_BLOCK}
CONTROL = {"input": "img", "output": "img"}

FLUX = FamilyPlan(
    family="Flux",
    model_class="comfy.ldm.flux.model.Flux",
    modules={**BLOCKS, "final_layer": ModulePlan(inputs={"modulation_dims": TokenRanges(streams=("img",))})},
    outputs={"final_layer": gathered("img")},
    control=CONTROL,
)
