"""Chroma and Chroma Radiance."""

from .family import FamilyPlan, gathered
from .flux import BLOCKS, CONTROL, JOINT

CHROMA = FamilyPlan(
    family="Chroma",
    model_class="comfy.ldm.chroma.model.Chroma",
    modules=BLOCKS,
    outputs={"final_layer": gathered("img")},
    control=CONTROL,
)
CHROMA_RADIANCE = FamilyPlan(
    family="Chroma Radiance",
    model_class="comfy.ldm.chroma_radiance.model.ChromaRadiance",
    modules=BLOCKS,
    # The head that follows pairs every image token with the pixels of its patch, of the whole image.
    outputs={"single_blocks.-1": gathered("img", within=JOINT)},
    control=CONTROL,
)
