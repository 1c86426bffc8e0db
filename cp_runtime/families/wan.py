"""Wan 2.1 and 2.2: text to video, image to video, per-frame timesteps, in-context references."""

from ..plan import ContextParallelInput, ContextParallelOutput, FamilyPlan, ModulePlan, PerFrame

VIDEO = ("video",)

WAN = FamilyPlan(
    family="Wan",
    model_class="comfy.ldm.wan.model.WanModel",
    modules={
        "blocks.*": ModulePlan(
            inputs={
                "x": ContextParallelInput(split_dim=1, expected_dims=3, streams=VIDEO),
                "freqs": ContextParallelInput(split_dim=1, expected_dims=6, streams=VIDEO, side=True),
                "e": PerFrame(stream="video", ndim=4),
            },
            attention=VIDEO,
            local=("cross_attn",),
        ),
        "head": ModulePlan(inputs={"e": PerFrame(stream="video", ndim=3)}),
    },
    outputs={"head": ContextParallelOutput(gather_dim=1, expected_dims=3, stream="video")},
)
