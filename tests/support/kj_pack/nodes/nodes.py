"""Rotations of positions in which one frequency of time is another one."""

from typing import Any

import torch
from torch import nn


class EmbedND_RifleX(nn.Module):
    def __init__(self, dim: int, theta: float, axes_dim: list[int], num_frames: int, k: int) -> None:
        super().__init__()
        self.dim, self.theta, self.axes_dim, self.num_frames, self.k = dim, theta, axes_dim, num_frames, k

    def forward(self, ids: Any) -> Any:
        turns = []
        for axis, size in enumerate(self.axes_dim):
            frequencies = 1.0 / self.theta ** (torch.arange(size // 2, dtype=torch.float64) * 2 / size)
            if axis == 0:
                frequencies[self.k - 1] = 1.8 * torch.pi / self.num_frames
            angles = ids[..., axis, None].double() * frequencies
            rows = torch.stack([angles.cos(), -angles.sin()], -1), torch.stack([angles.sin(), angles.cos()], -1)
            turns.append(torch.stack(rows, -2))
        return torch.cat(turns, -3).float().unsqueeze(1)


class ApplyRifleXRoPE_WanVideo:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "latent": ("LATENT",), "k": ("INT", {"default": 3, "min": 1})}}

    def patch(self, model: Any, latent: Any, k: int) -> Any:
        patched, transformer = model.clone(), model.get_model_object("diffusion_model")
        size = transformer.dim // transformer.num_heads
        axes = [size - 4 * (size // 6), 2 * (size // 6), 2 * (size // 6)]
        made = EmbedND_RifleX(size, 10000.0, axes, latent["samples"].shape[2], k)
        patched.add_object_patch("diffusion_model.rope_embedder", made)
        return (patched,)
