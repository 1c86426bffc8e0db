"""Safetensors files as memory-mapped tensors, of any size.

safetensors' own reader maps a file writable, which the kernel refuses for a file larger than the machine's memory.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

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
    header, metadata = _header(path)
    with open(path, "rb") as file:
        pages = system.file_pages(file.fileno())
    found = {}
    for name, entry in header.items():
        dtype = getattr(torch, _DTYPES.get(entry["dtype"], ""), None)
        if dtype is None:
            raise ValueError(f"{name} has dtype {entry['dtype']}, which torch {torch.__version__} does not have")
        begin, end = entry["data_offsets"]
        if begin == end:
            found[name] = torch.empty(entry["shape"], dtype=dtype)
        else:
            raw = torch.frombuffer(pages, dtype=torch.uint8, count=end - begin, offset=begin)
            found[name] = raw.view(dtype).view(entry["shape"])
    return found, metadata


def tensor_ranges(path: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """Return where the tensors of a file begin, and their bytes. Raises OSError or SafetensorError as `mapped_tensors` does."""
    header, _ = _header(path)
    return [(begin, end - begin) for begin, end in (entry["data_offsets"] for entry in header.values())]


def _header(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the entries of tensors by name, their offsets counted from the beginning of the file, and the metadata."""
    from safetensors import safe_open  # a part of diffusers and of ComfyUI; only this function needs it

    with safe_open(path, framework="numpy") as checked:  # checks that the header matches the file
        metadata: dict[str, str] | None = checked.metadata()
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for entry in header.values():
        entry["data_offsets"] = [8 + length + offset for offset in entry["data_offsets"]]
    return header, metadata
