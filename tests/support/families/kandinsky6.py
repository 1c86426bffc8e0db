"""Kandinsky 6: video with sound."""

from typing import Any

from . import Case, Model, Served, denoise, normal

CLASS = "comfy.ldm.kandinsky6.model.Kandinsky6NativeAVDiT"
KANDINSKY = dict(dims=(96, 64), head_dims=(32, 32), channels=(16, 20), text_dim=48, blocks=2)
MODELS = {
    "kandinsky6": Model(CLASS, KANDINSKY, "Kandinsky6", since="0.46.0"),
    "kandinsky6 equal": Model(CLASS, dict(KANDINSKY, dims=(64, 64)), "Kandinsky6", since="0.46.0"),
}


def video(batch: int = 1, frames: int = 3, height: int = 4, width: int = 5, sound: int = 17, text: int = 7) -> dict[str, Any]:
    latents = [normal(batch, 16, frames, height, width), normal(batch, sound, 20)]
    return {**denoise(batch, (1,), text), "x": latents, "y": normal(batch, 32)}


CASES = [
    Case("kandinsky6", "kandinsky6", video),
    Case("kandinsky6 odd batch 2", "kandinsky6", lambda: video(2, 3, 3, 5, 11, 5)),
    Case("kandinsky6 one frame", "kandinsky6", lambda: video(frames=1, sound=3)),
    Case("kandinsky6 as much sound as video", "kandinsky6 equal", lambda: video(1, 2, 3, 4, 24)),
    Case("kandinsky6 equal", "kandinsky6 equal", lambda: video(2, 2)),
]
SERVED: list[Served] = []  # until it was tried on a ComfyUI that has it
