"""HunyuanDiT."""

from typing import Any

import torch

from . import Case, Model, Served, denoise, normal, text_mask

# Layers above the middle one take what an earlier layer left.
HYDIT = dict(
    hidden_size=96, depth=4, num_heads=2, mlp_ratio=2.0, text_states_dim=48, text_states_dim_t5=64, text_len=9, text_len_t5=8,
)  # fmt: skip
HYDIT_1 = dict(HYDIT, num_heads=3, depth=6, size_cond=True, use_style_cond=True)
MODELS = {
    "hydit": Model("comfy.ldm.hydit.models.HunYuanDiT", HYDIT, "HunyuanDiT", {"image_model": "hydit"}),
    "hydit 1": Model("comfy.ldm.hydit.models.HunYuanDiT", HYDIT_1, "HunyuanDiT1", {"image_model": "hydit1"}),
}


def hydit(batch: int = 1, height: int = 12, width: int = 12, **extra: Any) -> dict[str, Any]:
    return denoise(
        batch, (4, height, width), 9, time="t", most=900.0, text_embedding_mask=text_mask(batch, 9),
        encoder_hidden_states_t5=normal(batch, 8, 64), text_embedding_mask_t5=text_mask(batch, 8),
        image_meta_size=torch.tensor([[768.0, 768.0, 700.0, 500.0, 0.0, 0.0]] * batch),
    ) | extra  # fmt: skip


def control(batch: int, tokens: int, layers: int) -> dict[str, Any]:
    """One for every layer that takes what an earlier one left, the last layer's last; the forward takes them off the list."""
    return {"input": [], "middle": [], "output": [normal(batch, tokens, 96, seed=i) for i in range(layers)]}


CASES = [
    Case("hydit", "hydit", hydit),
    Case("hydit batch 2 odd size", "hydit", lambda: hydit(batch=2, height=13, width=9)),
    Case("hydit 1", "hydit 1", hydit),
    Case("hydit 1 batch 2", "hydit 1", lambda: hydit(batch=2, height=10)),
    Case("hydit control", "hydit", lambda: hydit(control=control(1, 36, 1)), ("control",)),
    Case("hydit 1 control batch 2", "hydit 1", lambda: hydit(2, 13, 9, control=control(2, 35, 2)), ("control",)),
]
TEXT = {"conditioning_mt5xl": (1, 8, 64), "attention_mask": text_mask(1, 9), "attention_mask_mt5xl": text_mask(1, 8)}
SERVED = [Served("hydit", "hydit", (4, 12, 10), 9, 48, TEXT), Served("hydit_1", "hydit 1", (4, 13, 10), 9, 48, TEXT)]
