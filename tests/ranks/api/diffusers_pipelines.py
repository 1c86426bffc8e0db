"""Pipelines of diffusers around tiny transformers: embeddings go in, latents come out, so that nothing else is needed."""

from typing import Any

import diffusers
import torch
from diffusers_cases import normal, padding
from diffusers_models import build, fill
from torch import Tensor

from cp_runtime.nested import tensors

# Imported here, and so before the ranks are forked: each takes seconds.
NAMES = ("StableDiffusion3", "Flux", "Wan", "QwenImage", "LTX", "LTXImageToVideo", "Chroma", "ZImage")
CLASSES = {name: getattr(diffusers, f"{name}Pipeline") for name in NAMES}
COMPONENTS = ("vae", "text_encoder", "tokenizer")
PROMPT, NEGATIVE = normal(1, 7, 24), normal(1, 7, 24, seed=1)
POOLED, NEGATIVE_POOLED = normal(1, 12), normal(1, 12, seed=1)
CFG = dict(prompt_embeds=PROMPT, negative_prompt_embeds=NEGATIVE)
IMAGE, VIDEO = dict(height=96, width=80), dict(height=64, width=80, num_frames=9)

# Class, tiny model, and arguments of a call.
PIPELINES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sd3": (
        "StableDiffusion3",
        "sd3",
        dict(CFG, pooled_prompt_embeds=POOLED, negative_pooled_prompt_embeds=NEGATIVE_POOLED, guidance_scale=4.0, **IMAGE),
    ),
    "flux": ("Flux", "flux", dict(prompt_embeds=PROMPT, pooled_prompt_embeds=POOLED, **IMAGE)),
    "wan": ("Wan", "wan t2v", dict(CFG, **VIDEO)),
    "wan 2.2": ("Wan", "wan t2v", dict(CFG, guidance_scale=4.0, guidance_scale_2=3.0, **VIDEO)),
    "qwen": (
        "QwenImage",
        "qwen",
        dict(
            prompt_embeds=PROMPT, prompt_embeds_mask=padding(7, length=7), negative_prompt_embeds=normal(1, 5, 24),
            negative_prompt_embeds_mask=padding(3, length=5), true_cfg_scale=4.0, **IMAGE,
        ),
    ),
    "ltx": (
        "LTX",
        "ltx",
        dict(
            CFG, prompt_attention_mask=padding(7, length=7), negative_prompt_attention_mask=padding(4, length=7), height=128,
            width=160, num_frames=17,
        ),
    ),
    "chroma": (
        "Chroma",
        "chroma",
        dict(
            CFG, prompt_attention_mask=padding(5, length=7), negative_prompt_attention_mask=padding(3, length=7),
            guidance_scale=4.0, **IMAGE,
        ),
    ),
    "z image": (
        "ZImage",
        "z image",
        dict(prompt_embeds=[PROMPT[0]], negative_prompt_embeds=[NEGATIVE[0]], guidance_scale=4.0, **IMAGE),
    ),
    # A noise level per token: the first frame is there already.
    "ltx from an image": (
        "LTXImageToVideo",
        "ltx",
        dict(
            CFG, prompt_attention_mask=padding(7, length=7), negative_prompt_attention_mask=padding(4, length=7), height=128,
            width=160, num_frames=17, image=normal(1, 3, 128, 160).clamp(-1, 1), latents=normal(1, 60, 16),
        ),
    ),
}  # fmt: skip


def load(name: str) -> Any:
    cls, model, _ = PIPELINES[name]
    parts: dict[str, Any] = dict.fromkeys(COMPONENTS)
    if cls in ("StableDiffusion3", "Flux"):
        parts.update(text_encoder_2=None, tokenizer_2=None)
    if cls == "StableDiffusion3":
        parts.update(text_encoder_3=None, tokenizer_3=None)
    if name == "wan 2.2":  # one transformer for the first step, the other for the second
        parts.update(transformer_2=fill(build(model), seed=2), boundary_ratio=0.5)
    pipe = CLASSES[cls](transformer=build(model), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def arguments(name: str) -> dict[str, Any]:
    return {"num_inference_steps": 2, "output_type": "latent", **PIPELINES[name][2]}


def run(name: str, pipe: Any) -> Tensor:
    (out,) = tensors(pipe(generator=torch.Generator().manual_seed(0), return_dict=False, **arguments(name)))
    return out
