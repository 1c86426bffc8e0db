"""Kandinsky 6: video with sound."""

from ..engine.plan import ModulePlan
from .family import FamilyPlan, gathered, side, tokens

VISUAL, AUDIO = ("visual",), ("audio",)

KANDINSKY6 = FamilyPlan(
    family="Kandinsky 6",
    model_class="comfy.ldm.kandinsky6.model.Kandinsky6NativeAVDiT",
    since="0.46.0",
    modules={
        "visual_blocks.*": ModulePlan(
            inputs={
                "visual_embed": tokens(VISUAL),
                "audio_embed": tokens(AUDIO),
                "visual_rope": side(VISUAL, dim=1, dims=6),
                "audio_rope": side(AUDIO, dim=1, dims=6),
            },
        ),
        "visual_blocks.*.videoT": ModulePlan(local=("cross_attention",)),
        "visual_blocks.*.videoT.self_attention": ModulePlan(attention=VISUAL),
        "visual_blocks.*.audioT": ModulePlan(local=("cross_attention",)),
        "visual_blocks.*.audioT.self_attention": ModulePlan(attention=AUDIO),
        "visual_blocks.*.va_cross_attention": ModulePlan(attention=VISUAL, keys=AUDIO),
        "visual_blocks.*.av_cross_attention": ModulePlan(attention=AUDIO, keys=VISUAL),
    },
    outputs={"visual_blocks.-1": [gathered("visual"), gathered("audio")]},
    # Video and sound attend to each other without transformer_options.
    attention_names=("comfy.ldm.kandinsky5.model.optimized_attention",),
)
