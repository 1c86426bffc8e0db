"""Memory of a model's weights on this rank: mapped, sent, or of files of models that this computer has, too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from functools import cache
from mmap import mmap
from typing import Any, NamedTuple

import folder_paths
import torch
from comfy.cli_args import args
from torch import Tensor
from utils.extra_config import load_extra_path_config

from ...engine.weights.packing import round_up
from ...errors import ChangedFileError
from ...pool.messages import Copy, Load, Locate, Located
from ...pool.protocol import ALIGNMENT
from ...system import system
from ..shared.contents import content


class Buffer(NamedTuple):
    """Bytes.

    Args:
        memory: with Python's buffer protocol.
        is_file: pages of a file; False = of ComfyUI's process, which has them mapped as well; None = they came in a message, and
            are this process's own.
    """

    memory: Any
    is_file: bool | None


class MappedFile:
    """A file of a model that this rank maps. Raises OSError, ValueError: it cannot, or nothing is in it."""

    def __init__(self, path: str) -> None:
        self.path, self._file = path, open(path, "rb")  # noqa: SIM115  (as long as it is mapped)
        self._stamp, self.pages = self._written, system.file_pages(self._file.fileno())

    @property
    def _written(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())  # of this one, also where another one has replaced it
        return state.st_size, state.st_mtime_ns

    def check(self) -> None:
        """Raise ChangedFileError if it was written to: weights that were not read yet are other ones now."""
        if self._written != self._stamp:
            raise ChangedFileError(f"{self.path} was written to after the workers had mapped it")


class Memory(NamedTuple):
    """Memory of a model.

    Args:
        buffers: with its weights.
        moved: where a block's part is, as number of the buffer and offset, where that is not the block's own number.
        files: that some of the buffers map.
    """

    buffers: Sequence[Buffer]
    moved: Mapping[tuple[int, int], tuple[int, int]]
    files: Sequence[MappedFile] = ()

    def at(self, start: tuple[int, int]) -> tuple[Any, int]:
        """Return the buffer in which a part of a block is, and its offset there."""
        index, offset = self.moved.get(start, start)
        return self.buffers[index].memory, offset


class OwnFiles:
    """Parts of the next model that are in this computer's own files."""

    def __init__(self) -> None:
        self._files: dict[str, MappedFile] = {}
        self._places: dict[tuple[int, int], tuple[int, int]] = {}  # of a part, by its place in ComfyUI's process

    def locate(self, request: Locate) -> Located:
        """Look which copies are here, with the same content."""
        self._files, self._places = {}, {}
        found = []
        for index, copy in enumerate(request.copies):
            block, offset, nbytes = copy.region
            for path in _paths(copy):
                with contextlib.suppress(OSError, ValueError):
                    if path not in self._files:
                        self._files[path] = MappedFile(path)
                    if _has(self._files[path].pages, copy, nbytes):
                        self._places[block, offset] = list(self._files).index(path), copy.offset
                        found.append(index)
                        break
        return Located(found=tuple(found))

    def memory(self, request: Load, kept: Tensor, mapped: Sequence[mmap] | None) -> Memory:
        """Return the memory of a model that is loaded now.

        Args:
            kept: what has come with the request.
            mapped: the blocks; None = they cannot be mapped.
        """
        files, places = tuple(self._files.values()), self._places
        self._files, self._places = {}, {}
        if mapped is not None:
            return Memory([Buffer(each, of.is_file) for each, of in zip(mapped, request.blocks, strict=True)], {})
        moved = {start: (1 + number, offset) for start, (number, offset) in places.items()}
        end = request.memory_nbytes
        for block, offset, nbytes in request.sent:
            moved[block, offset] = 0, end
            end += round_up(nbytes, ALIGNMENT)
        return Memory([Buffer(kept.numpy().data, None), *(Buffer(each.pages, True) for each in files)], moved, files)


def _paths(copy: Copy) -> list[str]:
    inside = [(folder, os.path.join(folder, *copy.name.split("/"))) for folder in _model_folders().get(copy.folder, ())]
    return [path for folder, path in inside if os.path.abspath(path).startswith(os.path.join(folder, ""))]


def _has(pages: mmap, copy: Copy, nbytes: int) -> bool:
    if copy.offset + nbytes > len(pages):
        return False
    return content(torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=copy.offset)) == copy.digest


@cache
def _model_folders() -> dict[str, list[str]]:
    """Return this ComfyUI's folders by the kind of model in them, as `main.py` has them."""
    files = [os.path.join(os.path.dirname(os.path.abspath(folder_paths.__file__)), "extra_model_paths.yaml")]
    files += [file for given in args.extra_model_paths_config or [] for file in given]
    for file in filter(os.path.isfile, files):
        load_extra_path_config(file)
    return {kind: [os.path.abspath(each) for each in folders] for kind, (folders, _) in folder_paths.folder_names_and_paths.items()}
