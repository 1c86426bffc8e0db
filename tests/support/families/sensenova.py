"""SenseNova U1.5: behind a text, and behind keys and values of one."""

import functools
from typing import Any

import torch

from . import Case, Model, Served, normal

MODEL = "sensenova"
MODELS = {
    MODEL: Model("comfy.ldm.sensenova.model.SenseNovaU15", dict(dim=64, heads=2, kv_heads=1, layers=2, words=50), "SenseNovaU15",
        since="0.36.0"),
    "sensenova three heads": Model("comfy.ldm.sensenova.model.SenseNovaU15",
        dict(dim=96, heads=3, kv_heads=3, layers=2, words=50), "SenseNovaU15", since="0.36.0"),
}  # fmt: skip


def image(batch: int = 1, height: int = 20, width: int = 24, text: int = 11, **extra: Any) -> dict[str, Any]:
    ids = torch.arange(batch * text).view(batch, text) * 7 % 50
    return {"x": normal(batch, 3, height, width), "timesteps": torch.linspace(0.3, 0.9, batch), "text_input_ids": ids} | extra


def kept(batch: int, text: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Keys and values of two layers; what they are of is the same to the model."""
    each = [[normal(batch, heads, text, head_dim, seed=seed + layer) for layer in range(2)] for seed in (10, 20)]
    return {"prefix_keys": each[0], "prefix_values": each[1], "prefix_time": torch.full((batch,), text), "text_input_ids": None}


CASES = [
    Case("sensenova", MODEL, image),
    Case("sensenova odd size batch 2", MODEL, functools.partial(image, 2, 12, 20, 6)),
    Case("sensenova one text token", MODEL, functools.partial(image, text=1)),
    Case("sensenova kept prefix", MODEL, lambda: image(**kept(1, 9, 1, 32))),
    Case("sensenova kept prefix batch 2", MODEL, lambda: image(2, 12, **kept(2, 5, 1, 32))),
    Case("sensenova three heads", "sensenova three heads", image),
    Case("sensenova three heads, kept prefix", "sensenova three heads", lambda: image(2, **kept(2, 7, 3, 32))),
]
SERVED: list[Served] = []  # until it was tried on a ComfyUI that has it
