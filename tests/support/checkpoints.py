"""Small random checkpoints and LoRA files that stock ComfyUI loads: the real file formats, tiny dimensions, seeded
weights.

Needs torch and safetensors, not ComfyUI. The quantised kinds of QUANTISERS also need comfy_kitchen, with which ComfyUI
brings them.

Every tensor has a generator of its own, seeded by the file's seed and the tensor's name: the same name, seed and shape
give the same values, whatever else the file holds.
"""

import json
import math
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .architectures import SD3, Architecture, Flux, FluxControlNet, FluxUnion, Init, Wan

REPEATED = 1_000_003  # values; a prime, so that no two rows are alike


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
    "flux_union": Checkpoint(architecture=FluxUnion(hidden=256, double_blocks=1, single_blocks=0), folder="controlnet"),
    "wan_t2v": Checkpoint(architecture=Wan()),
    "wan_t2v_low": Checkpoint(architecture=Wan(), seed=1),
    "wan_t2v_fp8_scaled": Checkpoint(architecture=Wan(), quantization="fp8_scaled"),
    "wan_160": Checkpoint(architecture=Wan(dim=160)),
    "wan_i2v": Checkpoint(architecture=Wan(in_dim=36, image_embedding=True)),
    "wan22_i2v": Checkpoint(architecture=Wan(in_dim=36)),
    "wan22_5b": Checkpoint(architecture=Wan(in_dim=48, out_dim=48)),
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
    "flux_deep_lora": Lora(base="flux_deep", seed=13),
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


def write_flux(
    name: str, out: Path, hidden: int, double_blocks: int, single_blocks: int, *, dtype: torch.dtype = torch.float32
) -> Path:
    """Write `<name>.safetensors`, a Flux of any size, as `Checkpoint.repeated`; return its path."""
    architecture = Flux(hidden=hidden, double_blocks=double_blocks, single_blocks=single_blocks)
    checkpoint = Checkpoint(architecture=architecture, repeated=True)
    return write(name, out, dtype=dtype, file_stem=name, checkpoint=checkpoint)
