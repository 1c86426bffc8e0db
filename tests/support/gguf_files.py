"""Files for the tests' own loader of GGUF files (`gguf_pack`), which has the format: safetensors under the name of a GGUF file."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 32  # numbers


def write(source: Path, target: Path) -> None:
    """Write a file of blocks from one of safetensors. Biases and what does not divide stay float32."""
    tensors, shapes = {}, {}
    with safe_open(source, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            values = file.get_tensor(name)
            packs = values.ndim == 2 and values.shape[-1] % BLOCK == 0
            tensors[name] = pack(values) if packs else values.float()
            shapes[name] = list(values.shape)
        metadata = {**(file.metadata() or {}), "shapes": json.dumps(shapes)}
    save_file(tensors, target, metadata)


def pack(values: Tensor) -> Tensor:
    """Quantise `[..., multiple of 32]` to `[..., bytes]`."""
    blocks = values.float().unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    numbers = (blocks / scales.float().clamp(min=1e-9)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], -1).flatten(-2)
