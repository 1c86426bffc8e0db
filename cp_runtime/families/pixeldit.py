"""PixelDiT and PiD, which decodes a latent with it: in pixels."""

from ..engine.plan import ModulePlan
from ..engine.transforms import ContextParallelInput, ContextParallelOutput
from .family import FamilyPlan

JOINT = ("txt", "img")
IMAGE = ContextParallelInput(split_dim=1, expected_dims=3, streams=("img",))

PIXELDIT = FamilyPlan(
    family="PixelDiT",
    model_class="comfy.ldm.pixeldit.model.PixDiT_T2I",
    modules={
        "patch_blocks.*": ModulePlan(
            inputs={
                "x": IMAGE,
                "y": ContextParallelInput(split_dim=1, expected_dims=3, streams=("txt",)),
                "pos_img": ContextParallelInput(split_dim=0, expected_dims=4, streams=("img",), side=True),
                "pos_txt": ContextParallelInput(split_dim=0, expected_dims=4, streams=("txt",), side=True),
            },
            attention=JOINT,
        ),
        # These blocks make positions from the size of the image, so they keep all pixels, and share their attention.
        "pixel_blocks.*.attn": ModulePlan(
            inputs={"x": ContextParallelInput(split_dim=1, expected_dims=3, streams=("patches",), replicated=True)},
            attention=("patches",),
        ),
    },
    outputs={"patch_blocks.-1": [ContextParallelOutput(gather_dim=1, expected_dims=3, stream="img"), None]},
)
PID = FamilyPlan(
    family="PiD",
    model_class="comfy.ldm.pixeldit.pid.PidNet",
    modules={
        "lq_proj.gate_modules.*": ModulePlan(
            inputs={"x": IMAGE, "lq": ContextParallelInput(split_dim=1, expected_dims=3, streams=("img",), side=True)}
        ),
        **PIXELDIT.modules,
    },
    outputs=PIXELDIT.outputs,
)
