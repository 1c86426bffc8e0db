"""Safetensors files as memory-mapped tensors, of any size.

safetensors' own reader maps a file writable, which the kernel refuses for a file larger than the machine's memory.
"""

from __future__ import annotations

import json
import os
import struct

import torch
from torch import Tensor

from ...system import system

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


def mapped_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """Return the tensors of a file by name, and its metadata. Tensors are read on first use. Writes to them stay in this process.

    Raises:
        OSError, safetensors.SafetensorError: the file cannot be read, or has another format.
        ValueError: it holds a dtype that this torch does not have.
    """
    from safetensors import safe_open  # a part of diffusers and of ComfyUI; only this function needs it

    with safe_open(path, framework="numpy") as checked:  # checks that the header matches the file
        metadata: dict[str, str] | None = checked.metadata()
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        pages = system.file_pages(file.fileno())
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            dtype = getattr(torch, _DTYPES.get(entry["dtype"], ""), None)
            if dtype is None:
                raise ValueError(f"{name} has dtype {entry['dtype']}, which torch {torch.__version__} does not have")
            begin, end = entry["data_offsets"]
            if begin == end:
                found[name] = torch.empty(entry["shape"], dtype=dtype)
            else:
                raw = torch.frombuffer(pages, dtype=torch.uint8, count=end - begin, offset=8 + length + begin)
                found[name] = raw.view(dtype).view(entry["shape"])
    return found, metadata
