"""The format: what writes a file, for tests, and what reads one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 32  # numbers
PACKED = BLOCK + 2  # bytes: a scale in float16, then the numbers
DTYPES = {"U8": np.uint8, "F32": np.float32}


def pack(values: Tensor) -> Tensor:
    """Quantise `[..., multiple of 32]` to `[..., bytes]`."""
    blocks = values.float().unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    numbers = (blocks / scales.float().clamp(min=1e-9)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], -1).flatten(-2)


def unpack(data: Tensor, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
    """The numbers of packed ones."""
    blocks = data.reshape(-1, PACKED)
    scales = blocks[:, :2].contiguous().view(torch.float16).to(dtype or torch.float32)
    return (blocks[:, 2:].contiguous().view(torch.int8) * scales).reshape(shape)


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


def read(path: str) -> tuple[dict[str, tuple[Tensor, list[int], bool]], dict[str, Any]]:
    """(data in the file's pages, shape, whether it is packed) by name, and the metadata."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__")
    shapes, whole = json.loads(metadata["shapes"]), np.memmap(path, mode="r")
    found = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        data = whole[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        found[name] = torch.from_numpy(data), shapes[name], entry["dtype"] == "U8"
    return found, metadata
