"""HiDream-I1 and E1."""

from typing import Any

from . import Case, Model, Served, denoise, normal

HIDREAM = dict(
    attention_head_dim=32, axes_dims_rope=[16, 8, 8], caption_channels=[48, 40], max_resolution=[128, 128], in_channels=16,
    llama_layers=[0, 1, 2, 1], num_attention_heads=3, num_routed_experts=4, num_activated_experts=2, num_layers=2,
    num_single_layers=2, out_channels=16, patch_size=2, text_emb_dim=24,
)  # fmt: skip
CLS = "comfy.ldm.hidream.model.HiDreamImageTransformer2DModel"
MODELS = {
    "hidream": Model(CLS, HIDREAM, "HiDream", {"image_model": "hidream"}),
    "hidream half rope": Model(CLS, dict(HIDREAM, axes_dims_rope=[8, 4, 4]), "HiDream", {"image_model": "hidream"}),
    "hidream dense": Model(CLS, dict(HIDREAM, num_routed_experts=0), "HiDream", {"image_model": "hidream"}),
}


def hidream(batch: int = 1, height: int = 12, width: int = 12, t5: int = 5, llama: int = 6, **extra: Any) -> dict[str, Any]:
    return denoise(
        batch, (16, height, width), t5, time="t", most=900.0, y=normal(batch, 24),
        encoder_hidden_states_llama3=normal(batch, 3, llama, 40),
    ) | extra  # fmt: skip


CASES = [
    Case("hidream", "hidream", hidream),
    Case("hidream batch 2 odd", "hidream", lambda: hidream(batch=2, height=13, width=9, t5=4, llama=3)),
    Case("hidream one token each", "hidream", lambda: hidream(height=2, width=2, t5=1, llama=1)),
    Case("hidream edit", "hidream", lambda: hidream(image_cond=normal(1, 16, 12, 12, seed=4)), ("image_cond",)),
    Case("hidream half rope", "hidream half rope", hidream),
    Case("hidream dense", "hidream dense", hidream),
]
SERVED = [Served("hidream", "hidream", (16, 16, 16), 8, 48, {"pooled_output": (1, 24), "conditioning_llama3": (1, 3, 6, 40)})]
