"""Modules of somebody's own, which are not of diffusers, and have no plan."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, context_dim: int | None = None, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.causal = heads, kv_heads, causal
        kv_dim = dim // heads * kv_heads
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(context_dim or dim, 2 * kv_dim), nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, context: Tensor | None = None, positions: tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None
    ) -> Tensor:
        k, v = self.kv(x if context is None else context).chunk(2, -1)
        q, k, v = (
            t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in ((self.q(x), self.heads), (k, self.kv_heads), (v, self.kv_heads))
        )
        if positions is not None:
            q, k = (t * positions[0][:, None, :, None] + positions[1][:, None, :, None] for t in (q, k))
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, scale=0.3, enable_gqa=grouped)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, context_dim: int, **attention: Any) -> None:
        super().__init__()
        self.attn = Attention(dim, **attention)
        self.cross = Attention(dim, **{**attention, "causal": False}, context_dim=context_dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, context: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x = x + self.attn(x, positions=positions, mask=mask)
        x = x + self.cross(x, context)
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Somebody's own model: no diffusers, no plan, attention through torch."""

    def __init__(self, heads: int = 3, kv_heads: int = 3, causal: bool = False) -> None:
        super().__init__()
        dim = 16 * heads
        attention = dict(heads=heads, kv_heads=kv_heads, causal=causal)
        self.embed, self.out = nn.Linear(8, dim), nn.Linear(dim, 8)
        self.blocks = nn.ModuleList([Block(dim, 20, **attention) for _ in range(2)])

    def forward(self, hidden_states: Tensor, context: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        x = self.embed(hidden_states)
        positions = torch.linspace(0.5, 1.5, x.shape[1]).expand(x.shape[0], -1)
        for block in self.blocks:
            x = block(x, context, (positions, positions.sin()), mask)
        return (self.out(x),)


class OwnAttention(nn.Module):
    """Attention out of matrix products: torch's function is not called."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class TorchAttention(nn.Module):
    """Attention inside of a function of torch that is more than attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class TorchFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(32, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class Windows(nn.Module):
    """Attention over windows, which the table takes for one over all tokens where a rank holds just one of them."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.qkv = tokens, nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (-1, self.tokens)).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v).flatten(1, 2)


class OwnMask(nn.Module):
    """Makes its mask for the tokens that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        mask = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool)
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)


class Computed(nn.Module):
    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


class TwoWays(nn.Module):
    """What its attention is over is decided by a number that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.attention, self.last, self.out = nn.Linear(8, 32), Attention(32, 2, 2), Attention(32, 2, 2), nn.Linear(32, 8)

    def forward(self, hidden_states: Tensor, context: Tensor, crosses: int = 0) -> tuple[Tensor, ...]:
        x = self.inp(hidden_states)
        x = self.attention(x, context if crosses else None)
        return (self.out(self.last(x)),)
