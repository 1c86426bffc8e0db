"""ERNIE-Image."""

from typing import Any

from torch import Tensor

from . import Case, Model, Served, denoise

ERNIE = dict(
    hidden_size=128, num_attention_heads=2, num_layers=2, ffn_hidden_size=192, in_channels=128, out_channels=128, patch_size=1,
    text_in_dim=48, rope_axes_dim=(16, 24, 24),
)  # fmt: skip
PATCHES = dict(ERNIE, hidden_size=192, num_attention_heads=3, patch_size=2, text_in_dim=192)


def init(name: str, parameter: Tensor, values: Tensor) -> Tensor | None:
    """Norms by another name: at the usual size of a bias, attention would be a whisper."""
    return 1.5 + 0.1 * values if name.endswith("_ln.weight") else None


CLASS = "comfy.ldm.ernie.model.ErnieImageModel"
MODELS = {
    "ernie": Model(CLASS, ERNIE, "ErnieImage", {"image_model": "ernie"}, init),
    "ernie patches": Model(CLASS, PATCHES, "ErnieImage", {"image_model": "ernie"}, init),
}


def ernie(batch: int = 1, height: int = 6, width: int = 6, text: int = 7, width_of_text: int = 48, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (128, height, width), text, width_of_text, time="timesteps", most=900.0) | extra


CASES = [
    Case("ernie", "ernie", ernie),
    Case("ernie batch 2 odd size", "ernie", lambda: ernie(batch=2, height=7, width=5, text=4)),
    Case("ernie one text token", "ernie", lambda: ernie(text=1)),
    Case("ernie patches", "ernie patches", lambda: ernie(1, 12, 10, 6, 192)),
    Case("ernie scaled positions", "ernie", ernie, options={"rope_options": {"scale_x": 0.7, "scale_y": 1.3, "shift_t": 1.0}}),
]
SERVED = [Served("ernie", "ernie", (128, 6, 5), 7, 48)]
