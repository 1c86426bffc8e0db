"""Mochi 1."""

from typing import Any

import torch

from . import Case, Model, Served, denoise, text_mask

# Its blocks insist on a width of the MLP.
SIZES = {"comfy.ldm.genmo.joint_model.asymm_models_joint": {12288: 192}}
MOCHI = dict(
    depth=3, patch_size=2, num_heads=3, hidden_size_x=96, hidden_size_y=64, mlp_ratio_x=2.0, mlp_ratio_y=4.0, learn_sigma=False,
    in_channels=12, qk_norm=True, qkv_bias=False, out_bias=True, attn_drop=0.0, patch_embed_bias=True, posenc_preserve_area=True,
    timestep_mlp_bias=True, attend_to_padding=False, timestep_scale=1000.0, use_t5=True, t5_feat_dim=48, t5_token_length=256,
    rope_theta=10000.0,
)  # fmt: skip
MODELS = {
    "mochi": Model("comfy.ldm.genmo.joint_model.asymm_models_joint.AsymmDiTJoint", MOCHI, "GenmoMochi",
        {"image_model": "mochi_preview"}, sizes=SIZES),
}  # fmt: skip


def mochi(batch: int = 1, frames: int = 3, height: int = 8, width: int = 10, text: int = 9, **extra: Any) -> dict[str, Any]:
    mask = text_mask(batch, text)
    return denoise(batch, (12, frames, height, width), text, attention_mask=mask, num_tokens=max(1, int(mask.sum()))) | extra


CASES = [
    Case("mochi", "mochi", mochi, ("num_tokens",)),
    Case("mochi batch 2 odd", "mochi", lambda: mochi(batch=2, frames=2, height=6, width=6, text=7)),
    Case("mochi batch 2 few tokens", "mochi", lambda: mochi(batch=2, num_tokens=4), ("num_tokens",)),
    Case("mochi one text token", "mochi", lambda: mochi(num_tokens=1), ("num_tokens",)),
    Case("mochi all text tokens", "mochi", lambda: mochi(num_tokens=9, attention_mask=torch.ones(1, 9, dtype=torch.long))),
]
SERVED = [Served("mochi", "mochi", (12, 3, 8, 8), 12, 48, {"attention_mask": text_mask(1, 12)})]
