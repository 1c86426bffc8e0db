"""Chroma and Chroma Radiance."""

from ..engine.transforms import ContextParallelOutput
from .family import FamilyPlan
from .flux import CONTROL, DOUBLE_BLOCK, JOINT, SINGLE_BLOCK

BLOCKS = {"double_blocks.*": DOUBLE_BLOCK, "single_blocks.*": SINGLE_BLOCK}

CHROMA = FamilyPlan(
    family="Chroma",
    model_class="comfy.ldm.chroma.model.Chroma",
    modules=BLOCKS,
    outputs={"final_layer": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="img")},
    control=CONTROL,
)
CHROMA_RADIANCE = FamilyPlan(
    family="Chroma Radiance",
    model_class="comfy.ldm.chroma_radiance.model.ChromaRadiance",
    modules=BLOCKS,
    # The head that follows pairs every image token with the pixels of its patch, of the whole image.
    outputs={"single_blocks.-1": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="img", within=JOINT)},
    control=CONTROL,
)
