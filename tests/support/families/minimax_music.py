"""MiniMax Music 3: songs of one window, and of several."""

from typing import Any

import torch
from torch import Tensor

from ..sizes import HIDDEN, LAYERS, MUSIC
from . import Case, Model, Served, denoise


def init(name: str, tensor: Tensor, values: Tensor) -> Tensor | None:
    """Buffers, which the constructor leaves to the checkpoint, and a scale that lets the conditioning through."""
    if name.endswith("inv_freq"):
        return 10000.0 ** -(torch.arange(len(tensor)) / len(tensor))
    return 0.1 * values if name.endswith("beta") else torch.ones(1) if name == "cond_layer_scale" else None


MODELS = {
    "minimax music": Model("comfy.ldm.minimax_music.dit.MiniMaxMusic3DiT", {}, "MiniMaxMusic3", {"audio_model": "minimax_music3"},
        init, sizes=MUSIC, since="0.33.0"),
}  # fmt: skip


def music(batch: int = 1, length: int = 40, frames: int = 12, scale: float = 1.0, **extra: Any) -> dict[str, Any]:
    """A window has up to 689 frames of the latent; 12 frames of the conditioning are 41 of them."""
    return denoise(batch, (128, length), frames, LAYERS * HIDDEN, conditioning_scale=torch.full((batch, 1, 1), scale)) | extra


CASES = [
    Case("music", "minimax music", music),
    Case("music batch 2 odd", "minimax music", lambda: music(2, 29, 11)),
    Case("music one frame", "minimax music", lambda: music(length=1, frames=1)),
    Case("music conditioning ends early", "minimax music", lambda: music(frames=5)),
    Case("music conditioning goes on", "minimax music", lambda: music(frames=20, scale=0.5)),
    Case("music without conditioning", "minimax music", lambda: music(2, scale=0.0)),
    Case("music one full window", "minimax music", lambda: music(length=689, frames=200)),
    Case("music two windows", "minimax music", lambda: music(length=690, frames=201)),
    Case("music three windows batch 2", "minimax music", lambda: music(2, 1100, 300)),
]
SERVED = [
    Served("minimax_music", "minimax music", (128, 40), 12, LAYERS * HIDDEN, {"conditioning_scale": (1, 1, 1)}),
    Served("minimax_music windows", "minimax music", (128, 700), 190, LAYERS * HIDDEN, {"conditioning_scale": (1, 1, 1)}),
]
