"""Ideogram 4."""

from typing import Any

from . import Case, Model, Served, denoise, text_mask

IDEOGRAM = dict(
    in_channels=128, num_layers=2, num_attention_heads=3, attention_head_dim=32, intermediate_size=128, adaln_dim=64,
    llm_features_dim=48, mrope_section=[6, 5, 5],
)  # fmt: skip
MODELS = {
    "ideogram4": Model("comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel", IDEOGRAM, "Ideogram4", {"image_model": "ideogram4"})
}


def ideogram4(batch: int = 1, height: int = 6, width: int = 5, text: int = 8, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (128, height, width), text, time="timesteps") | extra


CASES = [
    Case("ideogram4", "ideogram4", ideogram4, ("context",)),
    Case("ideogram4 odd size batch 2", "ideogram4", lambda: ideogram4(batch=2, height=7, width=5, text=3)),
    Case("ideogram4 image only", "ideogram4", lambda: ideogram4(context=None)),
    Case("ideogram4 mask", "ideogram4", lambda: ideogram4(attention_mask=text_mask(1, 8)), ("attention_mask",)),
    Case("ideogram4 mask batch 2", "ideogram4", lambda: ideogram4(batch=2, height=7, attention_mask=text_mask(2, 8)),
        ("attention_mask",)),
]  # fmt: skip
SERVED = [
    Served("ideogram4", "ideogram4", (128, 6, 5), 8, 48, cfg=2.0),
    Served("ideogram4-mask", "ideogram4", (128, 6, 5), 8, 48, {"attention_mask": text_mask(1, 8)}),
]
