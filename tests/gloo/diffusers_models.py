"""Tiny diffusers models with healthy random weights, for rank scripts."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from diffusers_cases import MODELS
from torch import Tensor, nn

from cp_runtime import ContextParallelInput, ContextParallelOutput, ModulePlan


def fill(module: nn.Module, seed: int = 1) -> nn.Module:
    """Weights that make every token depend on every other one: attention that is neither uniform nor one-hot, open gates."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight") and parameter.ndim == 1:
                parameter.copy_(1.5 + 0.1 * values)
            else:
                parameter.copy_(values / max(1, parameter[0].numel()) ** 0.5 if parameter.ndim > 1 else 0.2 * values)
    return module.eval()


# diffusers imports the file of a class when it is asked for it, which takes seconds: once, before the ranks are forked.
CLASSES = {cls: getattr(diffusers, cls) for cls, _ in MODELS.values()}


def build(name: str) -> nn.Module:
    cls, arguments = MODELS[name]
    model = CLASSES[cls](**arguments)
    if name == "flux ip adapter":
        model.encoder_hid_proj = _ImageProjection()
        for block in model.transformer_blocks:
            block.attn.set_processor(FluxIPAdapterAttnProcessor(64, 64, num_tokens=(4,), scale=[0.7]))
    return fill(model)


class _ImageProjection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(20, 64)

    def forward(self, embeds: list[Tensor]) -> list[Tensor]:
        return [self.projection(each) for each in embeds]


TOKENS, GATHERED = ContextParallelInput(1, 3), {"proj_out": ContextParallelOutput(1, 3)}
JOINT = {"transformer_blocks.0": {"hidden_states": TOKENS, "encoder_hidden_states": TOKENS}, **GATHERED}
ROPE = {"rope": {i: ContextParallelInput(0, 2, split_output=True) for i in (0, 1)}}
# What a user writes for a class that diffusers has no plan for.
PLANS: dict[str, dict[str, Any]] = {
    "HunyuanVideoTransformer3DModel": {**JOINT, **ROPE},
    "HunyuanImageTransformer2DModel": {**JOINT, **ROPE},
    "HunyuanVideo15Transformer3DModel": {**JOINT, **ROPE, "transformer_blocks.*": {"attention_mask": ContextParallelInput(1, 2)}},
    "SD3Transformer2DModel": JOINT,
    "CogVideoXTransformer3DModel": JOINT,
    "PixArtTransformer2DModel": {"transformer_blocks.0": {"hidden_states": TOKENS}, **GATHERED},
}

# Plans of diffusers split the video of LTX 2 only: its audio, and the text for it, are whole on every rank.
REPLICATED = {"LTX2VideoTransformer3DModel": ("transformer_blocks.*.audio_attn1", "transformer_blocks.*.audio_attn2")}


def plan_of(model: nn.Module) -> dict[str, Any]:
    """The model's own plan, and what it leaves unsaid.

    Helios names its 40 blocks one by one: those that a tiny model lacks are left out.
    """
    names = {name for name, _ in model.named_modules()}
    if type(model).__name__ in PLANS:
        return PLANS[type(model).__name__]
    plan = {path: entry for path, entry in model._cp_plan.items() if "*" in path or path in names}
    return {**plan, **{path: ModulePlan(attention=()) for path in REPLICATED.get(type(model).__name__, ())}}


def forward(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """All outputs. The inputs are copied: a model must not see what another call did to them."""
    inputs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return model(**inputs, return_dict=False)


def relative(outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Largest difference on any rank, in standard deviations of that output."""
    if [out.shape for out in outputs] != [out.shape for out in expected]:
        value = torch.tensor(float("inf"))
    else:
        value = torch.stack([(a - b).abs().max() / b.std() for a, b in zip(outputs, expected, strict=True)]).max()
        value = value.nan_to_num(float("inf"))
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()
