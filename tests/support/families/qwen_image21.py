"""Qwen-Image 2.1, from text, and with references between its parts."""

from typing import Any

from . import Case, Model, Served, denoise, normal

CLASS = "comfy.ldm.qwen_image21.model.QwenImage21Transformer2DModel"
QWEN = dict(in_channels=16, num_layers=2, attention_head_dim=32, num_attention_heads=2, context_in_dim=48)
MODELS = {
    "qwen 2.1": Model(CLASS, QWEN, "QwenImage21", since="0.37.0"),
    "qwen 2.1 three heads": Model(CLASS, dict(QWEN, num_attention_heads=3), "QwenImage21", since="0.37.0"),
}


def qwen(batch: int = 1, height: int = 6, width: int = 5, text: int = 9, **extra: Any) -> dict[str, Any]:
    return denoise(batch, (16, height, width), text, time="timesteps") | extra


def references(batch: int = 1, *sizes: tuple[int, int]) -> list[Any]:
    return [normal(batch, 16, *size) for size in sizes]


CASES = [
    Case("qwen21", "qwen 2.1", qwen),
    Case("qwen21 odd size batch 2", "qwen 2.1", lambda: qwen(2, 7, 3, 5)),
    Case("qwen21 one text token", "qwen 2.1", lambda: qwen(text=1)),
    Case("qwen21 reference behind the text", "qwen 2.1", lambda: qwen(ref_latents=references(1, (4, 3))), ("ref_latents",)),
    Case("qwen21 references between texts", "qwen 2.1",
        lambda: qwen(ref_latents=references(1, (4, 3), (2, 5)), image_slots=[3, 7]), ("ref_latents", "image_slots")),
    Case("qwen21 references in front", "qwen 2.1",
        lambda: qwen(2, ref_latents=references(2, (4, 3), (3, 4)), image_slots=[0, 0]), ("ref_latents", "image_slots")),
    Case("qwen21 fewer tokens than ranks", "qwen 2.1",
        lambda: qwen(1, 1, 2, 4, ref_latents=references(1, (1, 1), (1, 2)), image_slots=[1, 3]), ("ref_latents",)),
    Case("qwen21 three heads", "qwen 2.1 three heads",
        lambda: qwen(2, ref_latents=references(2, (5, 3)), image_slots=[4]), ("ref_latents",)),
]  # fmt: skip
SERVED: list[Served] = []  # until it was tried on a ComfyUI that has it
