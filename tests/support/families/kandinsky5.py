"""Kandinsky 5: text to image, text and image to video."""

from typing import Any

from . import Case, Model, Served, denoise, normal

CLASS = "comfy.ldm.kandinsky5.model.Kandinsky5"
KANDINSKY = dict(
    model_dim=96, axes_dims=(8, 12, 12), time_dim=64, ff_dim=128, visual_embed_dim=132, num_text_blocks=2, num_visual_blocks=2,
    in_text_dim=48, in_text_dim2=32,
)  # fmt: skip
UNET = {"image_model": "kandinsky5"}
MODELS = {
    "kandinsky5 video": Model(CLASS, KANDINSKY, "Kandinsky5", UNET),
    "kandinsky5 image": Model(CLASS, dict(KANDINSKY, visual_embed_dim=64), "Kandinsky5Image", UNET),
}


def video(
    batch: int = 1, frames: int = 3, height: int = 8, width: int = 10, text: int = 7, channels: int = 33, **extra: Any
) -> dict[str, Any]:
    return denoise(batch, (channels, frames, height, width), text, most=900.0, y=normal(batch, 32)) | extra


def image(batch: int = 1, height: int = 12, width: int = 10) -> dict[str, Any]:
    return video(batch=batch, x=normal(batch, 16, height, width))


CASES = [
    Case("kandinsky5 video", "kandinsky5 video", video),
    Case("kandinsky5 video odd size batch 2", "kandinsky5 video", lambda: video(batch=2, frames=5, height=7, width=9, text=5)),
    Case("kandinsky5 one frame", "kandinsky5 video", lambda: video(frames=1)),
    Case("kandinsky5 image to video", "kandinsky5 video", lambda: video(time_dim_replace=normal(1, 16, 1, 8, 10, seed=9)),
        ("time_dim_replace",)),
    Case("kandinsky5 shifted positions", "kandinsky5 video", video,
        options={"rope_options": {"scale_t": 2.0, "scale_y": 0.5, "shift_x": 3.0}}),
    Case("kandinsky5 image", "kandinsky5 image", image),
    Case("kandinsky5 image odd size batch 2", "kandinsky5 image", lambda: image(batch=2, height=11, width=9)),
]  # fmt: skip
SERVED = [
    Served("kandinsky5-video", "kandinsky5 video", (16, 3, 8, 10), 7, 48, {"pooled_output": (1, 32)}, cfg=2.0),
    Served("kandinsky5-i2v", "kandinsky5 video", (16, 3, 8, 10), 7, 48,
        {"pooled_output": (1, 32), "time_dim_replace": (1, 16, 1, 8, 10)}),
    Served("kandinsky5-image", "kandinsky5 image", (16, 12, 10), 7, 48, {"pooled_output": (1, 32)}),
]  # fmt: skip
