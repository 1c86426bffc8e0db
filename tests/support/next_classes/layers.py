"""What the stand-ins have in common: attention over `[B, tokens, heads, D]`, and rotary positions by a cosine and a sine."""

from typing import Any

import torch
from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor, nn


class Projections(nn.Module):
    """Queries, keys and values, `[B, tokens, heads, D]`, and what is made of the result."""

    def __init__(self, dim: int, heads: int, operations: Any, kv_heads: int = 0, **place: Any) -> None:
        super().__init__()
        self.heads, inner = heads, (kv_heads or heads) * (dim // heads)
        self.to_q = operations.Linear(dim, dim, **place)
        self.to_k = operations.Linear(dim, inner, **place)
        self.to_v = operations.Linear(dim, inner, **place)
        self.to_out = operations.Linear(dim, dim, **place)
        self.norm = operations.RMSNorm(dim // heads, **place)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(2, (-1, self.norm.weight.shape[0])) for layer in (self.to_q, self.to_k, self.to_v))
        return self.norm(q) * positions, self.norm(k) * positions, v


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, **more: Any) -> Tensor:
    return optimized_attention(q.flatten(2), k.flatten(2), v.flatten(2), heads, **more)


def waves(positions: Tensor, dim: int) -> Tensor:
    """A factor per token and channel, `[..., tokens, dim]`."""
    return 1.0 + 0.5 * torch.cos(positions[..., None].float() * torch.arange(1, dim + 1, device=positions.device) / dim)
