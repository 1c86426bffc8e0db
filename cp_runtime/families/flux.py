"""Flux 1, Kontext, Flux 2 and the models that share their class or its blocks."""

from dataclasses import replace

from ..engine.plan import ModulePlan
from ..engine.transforms import TokenRanges
from .family import FamilyPlan, gathered, side, tokens

JOINT = ("txt", "img")
PE = side(JOINT, dim=2, dims=6)  # rotations `[B, 1, tokens, D / 2, 2, 2]`
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
CHROMA = FamilyPlan(
    family="Chroma",
    model_class="comfy.ldm.chroma.model.Chroma",
    modules=BLOCKS,
    outputs={"final_layer": gathered("img")},
    control=CONTROL,
)
CHROMA_RADIANCE = replace(
    CHROMA,
    family="Chroma Radiance",
    model_class="comfy.ldm.chroma_radiance.model.ChromaRadiance",
    # The head that follows pairs every image token with the pixels of its patch, of the whole image.
    outputs={"single_blocks.-1": gathered("img", within=JOINT)},
)
HUNYUAN_3D_2 = replace(CHROMA, family="Hunyuan3D 2", model_class="comfy.ldm.hunyuan3d.model.Hunyuan3Dv2", control={})
