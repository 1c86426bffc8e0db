"""Small random checkpoints and LoRA files that stock ComfyUI loads: the real file formats, tiny dimensions, seeded
weights.

Needs torch and safetensors, not ComfyUI: a family is a table of the tensors that its published checkpoints hold. The
quantised kinds of QUANTISERS also need comfy_kitchen, with which ComfyUI brings them.

What ComfyUI's model detection fixes, and what these tables therefore cannot vary:

- flux: heads of 128, MLP ratio 4, 16 latent channels, patch 2. Free: hidden size (a multiple of 128), depths, text
  width, pooled width, with or without guidance.
- wan: the head size is 128 unless the file's metadata carries a `config`, which may override any constructor argument.
- ltxv: the same override by metadata.
- sd3: heads of 64, as many blocks as heads.

Weights are drawn so that a sampling run says something. Linear layers keep unit variance, gates and modulation are of
the order of 0.3 to 0.5, and queries and keys give attention logits a spread of about two, so that every token depends
visibly on every other token and on the text, and the output is of the order of one.

Every tensor has a generator of its own, seeded by the file's seed and the tensor's name: the same name, seed and shape
give the same values, whatever else the file holds.
"""

from __future__ import annotations

import json
import math
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

QK_GAIN = 1.4
"""Mean of the query and key norm weights; the logits then have a standard deviation of QK_GAIN squared."""

GATE_GAIN = 0.5
BIAS_STD = 0.1
REPEATED = 1_000_003  # values; a prime, so that no two rows are alike


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
class LTXV(Architecture):
    """LTX-Video: 128 latent channels, no patches, self-attention and masked cross-attention."""

    dim: int = 128
    heads: int = 4
    layers: int = 2
    caption_dim: int = 64

    def tensors(self) -> Iterator[Init]:
        dim = self.dim
        yield from _linear("patchify_proj", dim, 128)
        yield from _linear("adaln_single.emb.timestep_embedder.linear_1", dim, 256, gain=1.4)
        yield from _linear("adaln_single.emb.timestep_embedder.linear_2", dim, dim)
        yield from _linear("adaln_single.linear", 6 * dim, dim, gain=GATE_GAIN)
        yield from _linear("caption_projection.linear_1", dim, self.caption_dim)
        yield from _linear("caption_projection.linear_2", dim, dim, gain=1.4)
        for i in range(self.layers):
            block = f"transformer_blocks.{i}"
            yield Init(name=f"{block}.scale_shift_table", shape=(6, dim), std=0.3)
            for attention in ("attn1", "attn2"):
                for name in ("to_q", "to_k", "to_v", "to_out.0"):
                    yield from _linear(f"{block}.{attention}.{name}", dim, dim)
                yield from _norm(f"{block}.{attention}.q_norm.weight", dim, mean=QK_GAIN)
                yield from _norm(f"{block}.{attention}.k_norm.weight", dim, mean=QK_GAIN)
            yield from _linear(f"{block}.ff.net.0.proj", 4 * dim, dim)
            yield from _linear(f"{block}.ff.net.2", dim, 4 * dim)
        yield Init(name="scale_shift_table", shape=(2, dim), std=0.3)
        yield from _linear("proj_out", 128, dim)

    def metadata(self) -> dict[str, str]:
        config = {
            "num_attention_heads": self.heads,
            "attention_head_dim": self.dim // self.heads,
            "cross_attention_dim": self.dim,
            "caption_channels": self.caption_dim,
        }
        return {"config": json.dumps({"transformer": config})}

    def lora_targets(self) -> list[str]:
        return [f"transformer_blocks.{i}.attn1.{name}" for i in range(self.layers) for name in ("to_q", "to_k", "to_v")]


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


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A named checkpoint file.

    Args:
        architecture: the family and its sizes.
        seed: seed of the weights.
        quantization: how weights are stored. Everything but "fp8_plain" concerns the linear layers of the blocks only.
            "fp8_plain": the whole file is float8_e4m3fn, without scales.
            "fp8": float8_e4m3fn with a scale per layer, listed in the file's metadata.
            "fp8_scaled": the same in ComfyUI's older format, a marker tensor and `scale_weight`, here with `scale_input`.
            "fp8_mixed": the MLPs as "fp8", each layer with a `comfy_quant` tensor in place of metadata; the rest bfloat16.
            A key of QUANTISERS: as ComfyUI's own quantisers store it.
        prefix: what the names of tensors begin with; "model.diffusion_model." makes a file for Load Checkpoint.
        folder: of `models`, unless a prefix is given.
        repeated: tensors repeat their first million values, because a model of several GB would take a minute to draw.
    """

    architecture: Architecture
    seed: int = 0
    quantization: str | None = None
    prefix: str = ""
    folder: str = "diffusion_models"
    repeated: bool = False


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A named LoRA file.

    Args:
        base: name of the checkpoint it belongs to.
        kohya: write `lora_unet_…lora_down` keys (kohya) in place of `diffusion_model.…lora_A` keys (generic).
        strength: standard deviation of the change, relative to the weight it changes.
    """

    base: str
    seed: int
    rank: int = 4
    kohya: bool = False
    strength: float = 0.5


CHECKPOINTS: dict[str, Checkpoint] = {
    "flux": Checkpoint(architecture=Flux(hidden=256)),
    "flux_h1": Checkpoint(architecture=Flux(hidden=128)),
    "flux_h3": Checkpoint(architecture=Flux(hidden=384, double_blocks=1, single_blocks=1)),
    "flux_deep": Checkpoint(architecture=Flux(hidden=128, double_blocks=1, single_blocks=24)),
    "flux_schnell": Checkpoint(architecture=Flux(hidden=256, double_blocks=1, single_blocks=1, guidance=False)),
    **{
        f"flux_{kind}": Checkpoint(architecture=Flux(hidden=256), quantization=kind)
        for kind in ("fp8", "fp8_plain", "fp8_scaled", "fp8_mixed", "int8_convrot", "mxfp8", "nvfp4")
    },
    "flux_fp8_checkpoint": Checkpoint(architecture=Flux(hidden=256), quantization="fp8", prefix="model.diffusion_model."),
    "flux_controlnet": Checkpoint(architecture=FluxControlNet(hidden=256, double_blocks=1, single_blocks=1), folder="controlnet"),
    "flux_large": Checkpoint(architecture=Flux(hidden=1024, double_blocks=4, single_blocks=8)),
    "wan_t2v": Checkpoint(architecture=Wan()),
    "wan_t2v_low": Checkpoint(architecture=Wan(), seed=1),
    "wan_t2v_fp8_scaled": Checkpoint(architecture=Wan(), quantization="fp8_scaled"),
    "wan_t2v_h3": Checkpoint(architecture=Wan(dim=96, heads=3)),
    "wan_160": Checkpoint(architecture=Wan(dim=160)),
    "wan_i2v": Checkpoint(architecture=Wan(in_dim=36, image_embedding=True)),
    "wan22_i2v": Checkpoint(architecture=Wan(in_dim=36)),
    "wan22_5b": Checkpoint(architecture=Wan(in_dim=48, out_dim=48)),
    "ltxv": Checkpoint(architecture=LTXV()),
    "sd3": Checkpoint(architecture=SD3()),
}

QUANTISERS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "int8_convrot": (
        "TensorWiseINT8Layout",
        {"per_channel": True, "convrot": True, "convrot_groupsize": 64},
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64},
    ),
    "mxfp8": ("TensorCoreMXFP8Layout", {}, {"format": "mxfp8"}),
    "nvfp4": ("TensorCoreNVFP4Layout", {}, {"format": "nvfp4"}),
}
"""Layout of comfy_kitchen and its options, and what the file says about a layer."""

LORAS: dict[str, Lora] = {
    "flux_lora": Lora(base="flux", seed=10),
    "flux_lora_kohya": Lora(base="flux", seed=11, rank=8, kohya=True),
    "wan_t2v_lora": Lora(base="wan_t2v", seed=12),
}


def random_tensor(init: Init, *, seed: int, dtype: torch.dtype = torch.float32, repeated: bool = False) -> Tensor:
    """The tensor `init` describes, the same for the same name, shape and seed. See `Checkpoint` for `repeated`."""
    generator, count = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{init.name}".encode())), math.prod(init.shape)
    drawn = count if not repeated else min(count, REPEATED)
    values = torch.randn(drawn, generator=generator).mul_(init.std).add_(init.mean).to(dtype)
    return values.repeat(-(-count // drawn))[:count].view(init.shape) if drawn < count else values.view(init.shape)


def state_dict(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a checkpoint file."""
    tensors: dict[str, Tensor] = {}
    metadata = checkpoint.architecture.metadata()
    layers: dict[str, dict[str, object]] = {}
    kind = checkpoint.quantization
    for init in checkpoint.architecture.tensors():
        name = checkpoint.prefix + init.name
        tensor = random_tensor(init, seed=checkpoint.seed, dtype=dtype, repeated=checkpoint.repeated)
        if kind in (None, "fp8_plain") or "blocks." not in name or tensor.ndim != 2:
            tensors[name] = tensor
        elif kind == "fp8_mixed" and "mlp" not in name:
            tensors[name] = tensor.bfloat16()
        else:
            quantised, layers[name.removesuffix(".weight")] = quantize(kind, name, tensor)
            tensors |= quantised
    if kind == "fp8_plain":
        tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}
    elif kind == "fp8_scaled":
        for layer in layers:
            tensors[f"{layer}.scale_weight"] = tensors.pop(f"{layer}.weight_scale")
            tensors[f"{layer}.scale_input"] = torch.tensor(1 / 32)
        tensors[f"{checkpoint.prefix}scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)
    elif kind == "fp8_mixed":
        for layer, settings in layers.items():
            tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
    elif layers:
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})
    return tensors, metadata


def quantize(kind: str, name: str, weight: Tensor) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The tensors that a file holds for the linear weight `name`, and what it says about the layer."""
    if kind not in QUANTISERS:
        quantised, scale = quantize_fp8(weight)
        return {name: quantised, f"{name}_scale": scale}, {"format": "float8_e4m3fn"}
    from comfy_kitchen.tensor import QuantizedTensor

    layout, options, settings = QUANTISERS[kind]
    return QuantizedTensor.from_float(weight, layout, **options).state_dict(name), settings


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`(quantised, scale)` with `weight ≈ quantised * scale`, one scale for the whole tensor."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = weight.abs().amax().float() / limit
    return (weight.float() / scale).clamp(-limit, limit).to(torch.float8_e4m3fn), scale


def lora_state_dict(lora: Lora, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tensors of a LoRA file."""
    architecture = CHECKPOINTS[lora.base].architecture
    bases = {init.name: init for init in architecture.tensors()}
    tensors: dict[str, Tensor] = {}
    for target in architecture.lora_targets():
        base = bases[f"{target}.weight"]
        out_dim, in_dim = base.shape
        prefix = "lora_unet_" + target.replace(".", "_") if lora.kohya else f"diffusion_model.{target}"
        down, up = ("lora_down", "lora_up") if lora.kohya else ("lora_A", "lora_B")
        # The product of unit matrices over `rank` terms has standard deviation sqrt(rank).
        factor = math.sqrt(lora.strength * base.std / math.sqrt(lora.rank))
        for name, shape in ((down, (lora.rank, in_dim)), (up, (out_dim, lora.rank))):
            init = Init(name=f"{prefix}.{name}.weight", shape=shape, std=factor)
            tensors[init.name] = random_tensor(init, seed=lora.seed, dtype=dtype)
        tensors[f"{prefix}.alpha"] = torch.tensor(float(lora.rank))
    return tensors


def write(
    name: str, out: Path, *, dtype: torch.dtype = torch.float32, file_stem: str | None = None, checkpoint: Checkpoint | None = None
) -> Path:
    """Write one file under `out` and return its path. An existing file is kept, unless `checkpoint` is given.

    Args:
        name: a key of CHECKPOINTS or LORAS.
        out: a ComfyUI `models` folder.
        dtype: data type of the weights. The file name says when it is not float32: `flux-bfloat16.safetensors`.
        file_stem: file name without suffix, in place of the one derived from `name` and `dtype`.
        checkpoint: what to write under that name, in place of the entry of CHECKPOINTS.
    """
    known = list(CHECKPOINTS) + list(LORAS)
    if checkpoint is None and name not in known:
        raise ValueError(f"checkpoint: got {name!r}; allowed: {', '.join(known)}")
    suffix = "" if dtype is torch.float32 else f"-{str(dtype).removeprefix('torch.')}"
    content = checkpoint or CHECKPOINTS.get(name) or LORAS[name]
    folder = out / ("loras" if isinstance(content, Lora) else "checkpoints" if content.prefix else content.folder)
    path = folder / f"{file_stem or name + suffix}.safetensors"
    if checkpoint is None and path.exists():
        return path
    metadata: dict[str, str] = {}
    if isinstance(content, Lora):
        tensors = lora_state_dict(content, dtype)
    else:
        tensors, metadata = state_dict(content, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        # Renamed into place, so that a reader never sees half a file.
        save_file(tensors, Path(work) / path.name, metadata=metadata or None)
        (Path(work) / path.name).replace(path)
    return path


def write_all(names: Iterable[str], out: Path, *, dtype: torch.dtype = torch.float32) -> list[Path]:
    """`write` for every name."""
    return [write(name, out, dtype=dtype) for name in names]
