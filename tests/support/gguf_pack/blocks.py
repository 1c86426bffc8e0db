"""Reads files. `support.gguf_files` writes them."""

import json
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

PACKED = 2 + 32  # bytes of a block: a scale in float16, then the numbers
DTYPES = {"U8": np.uint8, "F32": np.float32}


def unpack(data: Tensor, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
    """The numbers of packed ones."""
    blocks = data.reshape(-1, PACKED)
    scales = blocks[:, :2].contiguous().view(torch.float16).to(dtype or torch.float32)
    return (blocks[:, 2:].contiguous().view(torch.int8) * scales).reshape(shape)


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
