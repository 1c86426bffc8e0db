"""Flux for training, with the tensors' names of its files: ComfyUI's own adds in place, so that it has no gradient.

Same arithmetic, but for one thing: the channels of a query's or key's head are in another order, all first parts of the pairs that
rotary embeddings turn before all second ones, which is faster. `checkpoint` puts them back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import page

HEAD = 128  # the channels of a head; ComfyUI detects no other
AXES = (16, 56, 56)  # of them for the picture's number, row and column
HIDDEN, DOUBLE, SINGLE = 128, 1, 6


def rope(places: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, 64] of places [tokens, 3]."""
    angles = [
        places[:, i, None].double() / 10000 ** torch.linspace(0, (dim - 2) / dim, dim // 2, dtype=torch.float64)
        for i, dim in enumerate(AXES)
    ]
    joined = torch.cat(angles, 1)
    return joined.cos().float(), joined.sin().float()


def places(top: int, left: int, side: int) -> Tensor:
    """Where the tokens of a crop of a page are, [tokens, 3]: texts are at 0, and `side` × `side` digits follow."""
    rows, columns = (torch.arange(side * page.TOKENS) + page.TOKENS * at for at in (top, left))
    found = torch.zeros(2 * page.SIDE + len(rows) * len(columns), 3)
    found[2 * page.SIDE :, 1:] = torch.cartesian_prod(rows, columns)
    return found


def rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys [B, heads, tokens, 128], turned by their places."""
    cos, sin = turns
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, torch.addcmul(second * cos, first, sin)), -1)


def attention(q: Tensor, k: Tensor, v: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """[B, heads, tokens, 128] each, to [B, tokens, hidden]. Step by step: torch's fused gradient is slower on a CPU."""
    scores = rotate(q, turns) @ (rotate(k, turns) * HEAD**-0.5).transpose(-1, -2)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def normal(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HEAD))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (HEAD,), self.scale, 1e-6)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_norm, self.key_norm = Scale(), Scale()

    def forward(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        return self.query_norm(q), self.key_norm(k), v


class Modulation(nn.Module):
    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.lin = nn.Linear(HIDDEN, parts * HIDDEN)

    def forward(self, vec: Tensor) -> tuple[Tensor, ...]:
        return self.lin(functional.silu(vec))[:, None].chunk(self.parts, -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.norm = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN), Norm()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.norm(self.qkv(x))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU("tanh"), nn.Linear(4 * HIDDEN, HIDDEN))


class DoubleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.img_mod, self.img_attn, self.img_mlp = Modulation(6), Attention(), mlp()
        self.txt_mod, self.txt_attn, self.txt_mlp = Modulation(6), Attention(), mlp()

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        img_mod, txt_mod = self.img_mod(vec), self.txt_mod(vec)
        of_img = self.img_attn(normal(img) * (1 + img_mod[1]) + img_mod[0])
        of_txt = self.txt_attn(normal(txt) * (1 + txt_mod[1]) + txt_mod[0])
        q, k, v = (torch.cat(pair, 2) for pair in zip(of_txt, of_img, strict=True))
        attended = attention(q, k, v, turns)
        texts = txt.shape[1]
        img = img + img_mod[2] * self.img_attn.proj(attended[:, texts:])
        txt = txt + txt_mod[2] * self.txt_attn.proj(attended[:, :texts])
        img = img + img_mod[5] * self.img_mlp(normal(img) * (1 + img_mod[4]) + img_mod[3])
        return img, txt + txt_mod[5] * self.txt_mlp(normal(txt) * (1 + txt_mod[4]) + txt_mod[3])


class SingleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.modulation, self.norm = Modulation(3), Norm()
        self.linear1, self.linear2 = nn.Linear(HIDDEN, 7 * HIDDEN), nn.Linear(5 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, vec: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        shift, scale, gate = self.modulation(vec)
        qkv, hidden = self.linear1(normal(x) * (1 + scale) + shift).split((3 * HIDDEN, 4 * HIDDEN), -1)
        attended = attention(*self.norm(qkv), turns)
        return x + gate * self.linear2(torch.cat((attended, functional.gelu(hidden, approximate="tanh")), -1))


class Embedder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_layer, self.out_layer = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, time: Tensor) -> Tensor:
        angles = 1000 * time[:, None] / 10000 ** (torch.arange(128) / 128)
        waves = torch.cat((angles.cos(), angles.sin()), 1)
        return self.out_layer(functional.silu(self.in_layer(waves.to(self.in_layer.weight.dtype))))


class LastLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 64)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(HIDDEN, 2 * HIDDEN))

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(vec)[:, None].chunk(2, -1)
        return self.linear(normal(x) * (1 + scale) + shift)


class Network(nn.Module):
    """Flux with one double and six single blocks, without pooled text."""

    def __init__(self) -> None:
        super().__init__()
        self.img_in, self.txt_in, self.time_in = nn.Linear(64, HIDDEN), nn.Linear(64, HIDDEN), Embedder(256)
        self.double_blocks = nn.ModuleList(DoubleBlock() for _ in range(DOUBLE))
        self.single_blocks = nn.ModuleList(SingleBlock() for _ in range(SINGLE))
        self.final_layer = LastLayer()
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Modulation and output begin at zero, but for open gates. In the first block every image token finds its text."""
        for name, parameter in self.named_parameters():
            if "mod" in name or name.startswith("final_layer") or name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            if name.endswith("mod.lin.bias"):
                parameter.view(6, -1)[[2, 5]] = 0.3
            elif name.endswith("modulation.lin.bias"):
                parameter.view(3, -1)[2] = 0.3
        # Left to itself, it had not found it after 1200 steps. A query is one vector, which its place turns; the key of a text
        # token is that vector as its own place would have turned it. So their product is largest where the places are the same.
        self.txt_in.weight[:64] = torch.eye(64)
        query, key = self.double_blocks[0].img_attn.qkv, self.double_blocks[0].txt_attn.qkv
        query.weight[:HIDDEN] *= 0.2
        key.weight[HIDDEN : 2 * HIDDEN] = 0
        for axis, waves in enumerate((page.ROW_WAVES, page.COLUMN_WAVES), 1):
            for i in range(page.FREQUENCIES):
                first = sum(AXES[:axis]) // 2 + i
                query.bias[first] = 1
                key.weight[HIDDEN + first, waves + i] = 1
                key.weight[HIDDEN + HEAD // 2 + first, waves + page.FREQUENCIES + i] = 1

    def forward(self, img: Tensor, time: Tensor, txt: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Velocity of image tokens [B, tokens, 64] at times [B], from text tokens [B, 64, 64]; `turns` as `rope` makes them."""
        vec, texts = self.time_in(time), txt.shape[1]
        img, txt = self.img_in(img), self.txt_in(txt)
        for block in self.double_blocks:
            img, txt = block(img, txt, vec, turns)
        x = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            x = block(x, vec, turns)
        return self.final_layer(x[:, texts:], vec)


def checkpoint(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A Flux file's tensors, in bfloat16. Flux has an embedding of the guidance's strength; here it adds nothing."""
    order = torch.arange(HEAD).view(2, -1).T.flatten()
    per_head = (torch.arange(HIDDEN).view(-1, HEAD)[:, order] + torch.arange(2)[:, None, None] * HIDDEN).flatten()
    tensors = {
        "guidance_in.in_layer.weight": torch.zeros(HIDDEN, 256), "guidance_in.in_layer.bias": torch.zeros(HIDDEN),
        "guidance_in.out_layer.weight": torch.zeros(HIDDEN, HIDDEN), "guidance_in.out_layer.bias": torch.zeros(HIDDEN),
    }  # fmt: skip
    for name, value in weights.items():
        if "qkv." in name or "linear1." in name:
            value = torch.cat((value[per_head], value[2 * HIDDEN :]))
        elif name.endswith("_norm.scale"):
            value = value[order]
        tensors[name] = value.contiguous()
    return {name: value.bfloat16() for name, value in tensors.items()}
