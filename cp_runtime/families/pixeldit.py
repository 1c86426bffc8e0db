"""PixelDiT and PiD, which decodes a latent with it: in pixels."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, side, tokens

PIXELDIT = FamilyPlan(
    family="PixelDiT",
    model_class="comfy.ldm.pixeldit.model.PixDiT_T2I",
    modules={
        "patch_blocks.*": ModulePlan(
            inputs={
                "x": tokens("img"),
                "y": tokens("txt"),
                "pos_img": side("img", dim=0, dims=4),
                "pos_txt": side("txt", dim=0, dims=4),
            },
            attention=("txt", "img"),
        ),
        # These blocks make positions from the size of the image, so they keep all pixels, and share their attention.
        "pixel_blocks.*.attn": ModulePlan(inputs={"x": tokens("patches", replicated=True)}, attention=("patches",)),
    },
    outputs={"patch_blocks.-1": [gathered("img"), None]},
)
PID = FamilyPlan(
    family="PiD",
    model_class="comfy.ldm.pixeldit.pid.PidNet",
    modules={
        "lq_proj.gate_modules.*": ModulePlan(inputs={"x": tokens("img"), "lq": side("img", dim=1, dims=3)}),
        **PIXELDIT.modules,
    },
    outputs=PIXELDIT.outputs,
)
