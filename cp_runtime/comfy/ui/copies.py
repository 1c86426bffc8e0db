"""Where the weights of a model are in its files: another computer that has these files, too, takes them from there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ...engine.weights.files import tensor_ranges
from ...pool.messages import Copy, Region
from ...system import system
from ..shared.contents import LEAST, content
from ..shared.values import Value
from .names import files_of, in_folder
from .values import value_of


def copies_of(patcher: Any, value: Value) -> tuple[Copy, ...]:
    """Return the parts of a model's memory that are in files of model folders, with the same content. In any thread; it reads all
    of both."""
    named = {path: (kind, name) for path in files_of(patcher) for kind, name in [in_folder(path)] if kind}
    if not named:
        return ()
    paths = {number: path for path, number in value_of(patcher.model).files.items()}
    blocks = [each.pages for each in value.blocks]
    large = [region for region in value.regions if region[2] >= LEAST]
    elsewhere = {nbytes for block, _, nbytes in large if block not in paths}
    known = {digest: place for path in named for digest, place in _contents(path, elsewhere)}
    return tuple(_copies(large, blocks, paths, named, known))


def _copies(
    regions: Sequence[Region],
    blocks: Sequence[Tensor],
    paths: dict[int, str],
    named: dict[str, tuple[str, str]],
    known: dict[str, tuple[str, int]],
) -> Iterator[Copy]:
    for block, offset, nbytes in regions:
        digest = content(blocks[block][offset : offset + nbytes])
        path, at = (paths[block], offset) if block in paths else known.get(digest, ("", 0))
        if path in named:
            kind, name = named[path]
            yield Copy(region=(block, offset, nbytes), folder=kind, name=name.replace(os.sep, "/"), offset=at, digest=digest)


def _contents(path: str, sizes: Set[int]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield tensors of a file by digest, those of these sizes."""
    if not sizes:
        return
    try:
        ranges = tensor_ranges(path)
    except (OSError, SafetensorError):  # of another kind: what is copied out of it is sent
        return
    with open(path, "rb") as file:
        pages = system.file_pages(file.fileno())
    for begin, nbytes in ranges:
        if nbytes in sizes:
            yield content(torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=begin)), (path, begin)
