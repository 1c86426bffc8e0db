"""The tensors that the published checkpoints of a family hold, by sizes: tables from which tiny files are made.

What ComfyUI's model detection fixes, and what these tables therefore cannot vary:

- flux: heads of 128, MLP ratio 4, 16 latent channels, patch 2. Free: hidden size (a multiple of 128), depths, text
  width, pooled width, with or without guidance.
- wan: the head size is 128 unless the file's metadata carries a `config`, which may override any constructor argument.
- sd3: heads of 64, as many blocks as heads.

Weights are drawn so that a sampling run says something. Linear layers keep unit variance, gates and modulation are of
the order of 0.3 to 0.5, and queries and keys give attention logits a spread of about two, so that every token depends
visibly on every other token and on the text, and the output is of the order of one.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

QK_GAIN = 1.4
"""Mean of the query and key norm weights; the logits then have a standard deviation of QK_GAIN squared."""

GATE_GAIN = 0.5
BIAS_STD = 0.1


@dataclass(frozen=True, kw_only=True)
class Init:
    """One tensor of a checkpoint: normal values of mean `mean` and standard deviation `std`."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


class Architecture:
    """What a checkpoint file is made from."""

    def tensors(self) -> Iterator[Init]:
        """Every tensor of the file."""
        raise NotImplementedError

    def metadata(self) -> dict[str, str]:
        """The metadata of the safetensors file."""
        return {}

    def lora_targets(self) -> list[str]:
        """Names of the linear layers a LoRA may change, without `.weight`."""
        return []


def _linear(name: str, out_dim: int, in_dim: int, *, gain: float = 1.0, bias_std: float = BIAS_STD) -> Iterator[Init]:
    """A linear layer that keeps the variance of unit inputs, times `gain` squared."""
    yield Init(name=f"{name}.weight", shape=(out_dim, in_dim), std=gain / math.sqrt(in_dim))
    yield Init(name=f"{name}.bias", shape=(out_dim,), std=bias_std)


def _norm(name: str, dim: int, *, mean: float = 1.0, bias: bool = False) -> Iterator[Init]:
    yield Init(name=name, shape=(dim,), std=0.1, mean=mean)
    if bias:
        yield Init(name=name.removesuffix(".weight") + ".bias", shape=(dim,), std=BIAS_STD)


@dataclass(frozen=True, kw_only=True)
class Flux(Architecture):
    """Flux.1: double-stream blocks, then single-stream blocks. Heads are always 128 wide."""

    hidden: int
    double_blocks: int = 2
    single_blocks: int = 2
    context_dim: int = 64
    pooled_dim: int = 64
    guidance: bool = True

    def __post_init__(self) -> None:
        if self.hidden % 128:
            raise ValueError(f"hidden: got {self.hidden}; allowed: multiples of 128, because a head of Flux is 128 wide")

    def tensors(self) -> Iterator[Init]:
        hidden = self.hidden
        yield from _linear("img_in", hidden, 64)
        yield from _linear("txt_in", hidden, self.context_dim)
        embedders = [("time_in", 256), ("vector_in", self.pooled_dim)] + ([("guidance_in", 256)] if self.guidance else [])
        for name, in_dim in embedders:
            # Half of the entries of a sinusoidal embedding's squares add up to one half: 1.4 restores unit variance.
            yield from _linear(f"{name}.in_layer", hidden, in_dim, gain=1.4)
            yield from _linear(f"{name}.out_layer", hidden, hidden)
        for i in range(self.double_blocks):
            for stream in ("img", "txt"):
                block = f"double_blocks.{i}.{stream}"
                yield from _linear(f"{block}_mod.lin", 6 * hidden, hidden, gain=GATE_GAIN, bias_std=0.3)
                yield from _linear(f"{block}_attn.qkv", 3 * hidden, hidden)
                yield from _norm(f"{block}_attn.norm.query_norm.scale", 128, mean=QK_GAIN)
                yield from _norm(f"{block}_attn.norm.key_norm.scale", 128, mean=QK_GAIN)
                yield from _linear(f"{block}_attn.proj", hidden, hidden)
                yield from _linear(f"{block}_mlp.0", 4 * hidden, hidden)
                yield from _linear(f"{block}_mlp.2", hidden, 4 * hidden)
        for i in range(self.single_blocks):
            block = f"single_blocks.{i}"
            yield from _linear(f"{block}.modulation.lin", 3 * hidden, hidden, gain=GATE_GAIN, bias_std=0.3)
            yield from _linear(f"{block}.linear1", 7 * hidden, hidden)
            yield from _linear(f"{block}.linear2", hidden, 5 * hidden)
            yield from _norm(f"{block}.norm.query_norm.scale", 128, mean=QK_GAIN)
            yield from _norm(f"{block}.norm.key_norm.scale", 128, mean=QK_GAIN)
        yield from _linear("final_layer.adaLN_modulation.1", 2 * hidden, hidden, gain=GATE_GAIN)
        yield from _linear("final_layer.linear", 64, hidden)

    def lora_targets(self) -> list[str]:
        double = ("img_attn.qkv", "img_attn.proj", "img_mlp.0", "txt_attn.qkv", "txt_mlp.2")
        single = ("linear1", "linear2")
        return [f"double_blocks.{i}.{name}" for i in range(self.double_blocks) for name in double] + [
            f"single_blocks.{i}.{name}" for i in range(self.single_blocks) for name in single
        ]


@dataclass(frozen=True, kw_only=True)
class FluxControlNet(Flux):
    """A ControlNet for Flux that takes the hint as an image, in the format of XLabs: some of its blocks, and what they add."""

    def tensors(self) -> Iterator[Init]:
        yield from (init for init in super().tensors() if not init.name.startswith("final_layer"))
        channels, strides = [3, *[16] * 8], 8
        for i in range(strides):
            conv = f"input_hint_block.{2 * i}"
            yield Init(name=f"{conv}.weight", shape=(16, channels[i], 3, 3), std=1.4 / math.sqrt(9 * channels[i]))
            yield Init(name=f"{conv}.bias", shape=(16,), std=BIAS_STD)
        yield from _linear("pos_embed_input", self.hidden, 64)
        for kind, count in (("controlnet_blocks", self.double_blocks), ("controlnet_single_blocks", self.single_blocks)):
            for i in range(count):
                yield from _linear(f"{kind}.{i}", self.hidden, self.hidden, gain=GATE_GAIN)


@dataclass(frozen=True, kw_only=True)
class FluxUnion(Flux):
    """A ControlNet for Flux that takes the hint as a latent, and which of `kinds` it is; in diffusers' names, as published."""

    kinds: int = 8

    def tensors(self) -> Iterator[Init]:
        hidden = self.hidden
        yield from _linear("x_embedder", hidden, 64)
        yield from _linear("controlnet_x_embedder", hidden, 64)
        yield from _linear("context_embedder", hidden, self.context_dim)
        yield Init(name="controlnet_mode_embedder.weight", shape=(self.kinds, hidden), std=1.0)
        for name, in_dim in (("timestep", 256), ("guidance", 256), ("text", self.pooled_dim)):
            yield from _linear(f"time_text_embed.{name}_embedder.linear_1", hidden, in_dim, gain=1.4)
            yield from _linear(f"time_text_embed.{name}_embedder.linear_2", hidden, hidden)
        for i in range(self.double_blocks):
            block = f"transformer_blocks.{i}"
            for name in ("norm1", "norm1_context"):
                yield from _linear(f"{block}.{name}.linear", 6 * hidden, hidden, gain=GATE_GAIN, bias_std=0.3)
            for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
                yield from _linear(f"{block}.attn.{name}", hidden, hidden)
            for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
                yield from _norm(f"{block}.attn.{name}.weight", 128, mean=QK_GAIN)
            for name in ("ff", "ff_context"):
                yield from _linear(f"{block}.{name}.net.0.proj", 4 * hidden, hidden)
                yield from _linear(f"{block}.{name}.net.2", hidden, 4 * hidden)
            yield from _linear(f"controlnet_blocks.{i}", hidden, hidden, gain=GATE_GAIN)


@dataclass(frozen=True, kw_only=True)
class Wan(Architecture):
    """Wan 2.1 and 2.2: self-attention over all frames, cross-attention to the text.

    Args:
        in_dim: latent channels of the input: 16, with 20 more for image to video; 48 for Wan 2.2 5B.
        out_dim: latent channels of the output.
        image_embedding: Wan 2.1 image to video, which also attends to 257 CLIP vision tokens.
    """

    dim: int = 128
    heads: int = 4
    layers: int = 2
    ffn: int = 256
    in_dim: int = 16
    out_dim: int = 16
    text_dim: int = 64
    image_embedding: bool = False

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim: got {self.dim}; allowed: multiples of {2 * self.heads}, an even head size times the heads")

    def tensors(self) -> Iterator[Init]:
        dim = self.dim
        yield Init(name="patch_embedding.weight", shape=(dim, self.in_dim, 1, 2, 2), std=1 / math.sqrt(4 * self.in_dim))
        yield Init(name="patch_embedding.bias", shape=(dim,), std=BIAS_STD)
        yield from _linear("text_embedding.0", dim, self.text_dim)
        yield from _linear("text_embedding.2", dim, dim, gain=1.4)
        yield from _linear("time_embedding.0", dim, 256, gain=1.4)
        yield from _linear("time_embedding.2", dim, dim)
        yield from _linear("time_projection.1", 6 * dim, dim, gain=GATE_GAIN)
        for i in range(self.layers):
            block = f"blocks.{i}"
            yield Init(name=f"{block}.modulation", shape=(1, 6, dim), std=0.3)
            for attention in ("self_attn", "cross_attn"):
                for name in ("q", "k", "v", "o"):
                    yield from _linear(f"{block}.{attention}.{name}", dim, dim)
                yield from _norm(f"{block}.{attention}.norm_q.weight", dim, mean=QK_GAIN)
                yield from _norm(f"{block}.{attention}.norm_k.weight", dim, mean=QK_GAIN)
            if self.image_embedding:
                yield from _linear(f"{block}.cross_attn.k_img", dim, dim)
                yield from _linear(f"{block}.cross_attn.v_img", dim, dim)
                yield from _norm(f"{block}.cross_attn.norm_k_img.weight", dim, mean=QK_GAIN)
            yield from _norm(f"{block}.norm3.weight", dim, bias=True)
            yield from _linear(f"{block}.ffn.0", self.ffn, dim)
            yield from _linear(f"{block}.ffn.2", dim, self.ffn)
        yield Init(name="head.modulation", shape=(1, 2, dim), std=0.3)
        yield from _linear("head.head", 4 * self.out_dim, dim)
        if self.image_embedding:
            yield from _norm("img_emb.proj.0.weight", 1280, bias=True)
            yield from _linear("img_emb.proj.1", 1280, 1280)
            yield from _linear("img_emb.proj.3", dim, 1280)
            yield from _norm("img_emb.proj.4.weight", dim, bias=True)

    def metadata(self) -> dict[str, str]:
        return {"config": json.dumps({"transformer": {"num_heads": self.heads, "text_dim": self.text_dim}})}

    def lora_targets(self) -> list[str]:
        names = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "cross_attn.v", "ffn.0")
        return [f"blocks.{i}.{name}" for i in range(self.layers) for name in names]


@dataclass(frozen=True, kw_only=True)
class SD3(Architecture):
    """Stable Diffusion 3.5: joint text and image attention. Heads are 64 wide and as many as there are blocks.

    Args:
        blocks: blocks and heads.
        grid: side of the table of position embeddings, and so the largest image side in patches.
    """

    blocks: int = 2
    context_dim: int = 64
    pooled_dim: int = 64
    grid: int = 32

    def tensors(self) -> Iterator[Init]:
        dim = 64 * self.blocks
        yield Init(name="pos_embed", shape=(1, self.grid * self.grid, dim), std=0.5)
        yield Init(name="x_embedder.proj.weight", shape=(dim, 16, 2, 2), std=1 / 8)
        yield Init(name="x_embedder.proj.bias", shape=(dim,), std=BIAS_STD)
        for name, in_dim in (("t_embedder", 256), ("y_embedder", self.pooled_dim)):
            yield from _linear(f"{name}.mlp.0", dim, in_dim, gain=1.4)
            yield from _linear(f"{name}.mlp.2", dim, dim)
        yield from _linear("context_embedder", dim, self.context_dim)
        for i in range(self.blocks):
            for stream in ("context_block", "x_block"):
                block = f"joint_blocks.{i}.{stream}"
                last_text = stream == "context_block" and i == self.blocks - 1
                yield from _linear(f"{block}.attn.qkv", 3 * dim, dim)
                yield from _norm(f"{block}.attn.ln_q.weight", 64, mean=QK_GAIN)
                yield from _norm(f"{block}.attn.ln_k.weight", 64, mean=QK_GAIN)
                modulations = 2 if last_text else 6
                yield from _linear(f"{block}.adaLN_modulation.1", modulations * dim, dim, gain=GATE_GAIN, bias_std=0.3)
                if not last_text:
                    yield from _linear(f"{block}.attn.proj", dim, dim)
                    yield from _linear(f"{block}.mlp.fc1", 4 * dim, dim)
                    yield from _linear(f"{block}.mlp.fc2", dim, 4 * dim)
        yield from _linear("final_layer.adaLN_modulation.1", 2 * dim, dim, gain=GATE_GAIN)
        yield from _linear("final_layer.linear", 64, dim)

    def lora_targets(self) -> list[str]:
        return [f"joint_blocks.{i}.x_block.attn.qkv" for i in range(self.blocks)]


class ClipL(Architecture):
    """The text encoder CLIP-L, in its full size: ComfyUI does not read that from the file."""

    def tensors(self) -> Iterator[Init]:
        dim = 768
        yield Init(name="text_model.embeddings.token_embedding.weight", shape=(49408, dim), std=1.0)
        yield Init(name="text_model.embeddings.position_embedding.weight", shape=(77, dim), std=0.1)
        for i in range(12):
            block = f"text_model.encoder.layers.{i}"
            for norm in ("layer_norm1", "layer_norm2"):
                yield from _norm(f"{block}.{norm}.weight", dim, bias=True)
            for projection in ("q", "k", "v", "out"):
                yield from _linear(f"{block}.self_attn.{projection}_proj", dim, dim)
            yield from _linear(f"{block}.mlp.fc1", 4 * dim, dim)
            yield from _linear(f"{block}.mlp.fc2", dim, 4 * dim)
        yield from _norm("text_model.final_layer_norm.weight", dim, bias=True)
        yield Init(name="text_projection.weight", shape=(dim, dim), std=1 / math.sqrt(dim))
