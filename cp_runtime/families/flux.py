"""Flux 1, Kontext, Flux 2 and the models that share their class."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput, TokenRanges
from .family import FamilyPlan

JOINT = ("txt", "img")
PE = ContextParallelInput(split_dim=2, expected_dims=6, streams=JOINT, side=True)
DOUBLE_BLOCK = ModulePlan(
    inputs={
        "txt": ContextParallelInput(split_dim=1, expected_dims=3, streams=("txt",)),
        "img": ContextParallelInput(split_dim=1, expected_dims=3, streams=("img",)),
        "pe": PE,
        "modulation_dims_img": TokenRanges(stream="img"),
    },
    attention=JOINT,
)
SINGLE_BLOCK = ModulePlan(inputs={"pe": PE, "modulation_dims": TokenRanges(stream="img", after="txt")}, attention=JOINT)
CONTROL = {"input": "img", "output": "img"}

FLUX = FamilyPlan(
    family="Flux",
    model_class="comfy.ldm.flux.model.Flux",
    modules={
        "double_blocks.*": DOUBLE_BLOCK,
        "single_blocks.*": SINGLE_BLOCK,
        "final_layer": ModulePlan(inputs={"modulation_dims": TokenRanges(stream="img")}),
    },
    outputs={"final_layer": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="img")},
    control=CONTROL,
)
