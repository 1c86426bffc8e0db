"""Stable Diffusion 3 and 3.5."""

from typing import Any

from . import Case, Model, Served, denoise, normal

SD3 = dict(
    in_channels=16, patch_size=2, out_channels=16, depth=2, input_size=None, adm_in_channels=32, pos_embed_scaling_factor=None,
    context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 48, "out_features": 128}},
)  # fmt: skip
SD35 = dict(
    SD3, depth=3, qk_norm="rms", x_block_self_attn_layers=[0, 1],
    context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 192}},
)  # fmt: skip
CLASS = "comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper"
MODELS = {
    "sd3": Model(CLASS, SD3, "SD3"),
    "sd3 registers": Model(CLASS, dict(SD3, register_length=3), "SD3"),
    "sd3.5 medium": Model(CLASS, SD35, "SD3"),
    "sd3 context processor": Model(CLASS, dict(SD35, x_block_self_attn_layers=[], context_processor_layers=1, context_size=64),
        "SD3"),
}  # fmt: skip


def sd3(batch: int = 1, height: int = 12, width: int = 12, text: int = 7, channels: int = 48, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (16, height, width), text, channels, time="timesteps", most=900.0, y=normal(batch, 32)) | extra


def sd35(batch: int = 1, **extra: Any) -> dict[str, Any]:
    return sd3(batch, channels=64, **extra)


def control(batch: int, tokens: int, width: int = 128) -> dict[str, Any]:
    shared = normal(batch, tokens, width, seed=8)
    return {"input": [], "middle": [], "output": [shared, None, shared] if width > 128 else [None, shared]}


CASES = [
    Case("sd3", "sd3", sd3),
    Case("sd3 batch 2 odd size", "sd3", lambda: sd3(batch=2, height=13, width=9, text=5)),
    Case("sd3 one text token", "sd3", lambda: sd3(text=1)),
    Case("sd3 without vector", "sd3", lambda: sd3(y=None)),
    Case("sd3 control", "sd3", lambda: sd3(control=control(1, 36)), ("control",)),
    Case("sd3 control batch 2", "sd3", lambda: sd3(2, 13, 9, control=control(2, 35)), ("control",)),
    Case("sd3 registers", "sd3 registers", sd3),
    Case("sd3 context processor", "sd3 context processor", sd35),
    Case("sd3.5 medium", "sd3.5 medium", sd35),
    Case("sd3.5 medium batch 2 odd size", "sd3.5 medium", lambda: sd35(batch=2, height=13, width=9, text=5)),
    Case("sd3.5 medium as much text as image", "sd3.5 medium", lambda: sd35(text=36)),
    Case("sd3.5 medium one text token", "sd3.5 medium", lambda: sd35(text=1)),
    Case("sd3.5 medium control", "sd3.5 medium", lambda: sd35(control=control(1, 36, 192)), ("control",)),
]
SERVED = [
    Served("sd3", "sd3", (16, 12, 10), 7, 48, {"pooled_output": (1, 32)}),
    Served("sd35_medium", "sd3.5 medium", (16, 13, 10), 7, 64, {"pooled_output": (1, 32)}),
]
