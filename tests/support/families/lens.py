"""Lens."""

from typing import Any

from . import Case, Model, Served, denoise, normal, text_mask

LENS = dict(
    in_channels=128, out_channels=32, num_layers=2, num_attention_heads=3, attention_head_dim=32, axes_dims_rope=(8, 12, 12),
    enc_hidden_dim=24, multi_layer_encoder_feature=True, selected_layer_index=(0, 1),
)  # fmt: skip
CLASS = "comfy.ldm.lens.model.LensTransformer2DModel"
MODELS = {
    "lens": Model(CLASS, LENS, "Lens", {"image_model": "lens"}),
    "lens one encoder layer": Model(CLASS, dict(LENS, multi_layer_encoder_feature=False, enc_hidden_dim=48), "Lens",
        {"image_model": "lens"}),
}  # fmt: skip


def lens(batch: int = 1, height: int = 6, width: int = 5, text: int = 8, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (128, height, width), text) | extra


def residuals(batch: int = 1) -> dict[str, list[Any]]:
    return {"input": [normal(batch, 30, 96, seed=1), None]}


CASES = [
    Case("lens", "lens", lens),
    Case("lens odd size batch 2", "lens", lambda: lens(batch=2, height=7, width=5, text=5)),
    Case("lens one text token", "lens", lambda: lens(text=1)),
    Case("lens one encoder layer", "lens one encoder layer", lens),
    Case("lens text mask", "lens", lambda: lens(attention_mask=text_mask(1, 8)), ("attention_mask",)),
    Case("lens text mask batch 2", "lens", lambda: lens(batch=2, attention_mask=text_mask(2, 8)), ("attention_mask",)),
    Case("lens residuals", "lens", lambda: lens(control=residuals()), ("control",)),
]
SERVED = [
    Served("lens", "lens", (128, 6, 5), 8, 48, cfg=2.0),
    Served("lens-mask", "lens", (128, 6, 5), 8, 48, {"attention_mask": text_mask(1, 8)}),
]
