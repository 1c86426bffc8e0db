"""The way to load a model again: the loader that ComfyUI used, the file, and plain options.

Read off a model in the UI process (`ui_recipes`), followed by the ranks (`wire_loading`, `rank_factory`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import MirrorError
from ...pool.typed import decode

LOADERS = ("load_diffusion_model", "load_checkpoint_guess_config")
VAE_LOADERS = ("load_vae_patcher", "load_checkpoint_vae_patcher")
FACTORY = "factory"
DTYPE_OPTIONS = ("dtype", "weight_dtype")
OPTIONS = (*DTYPE_OPTIONS, "fp8_optimizations")
REMEDY = "Use Load Diffusion Model or Load Checkpoint, or Unet Loader (GGUF) of ComfyUI-GGUF."
"""Where a loader is not one that workers can repeat."""
DECIDED_BY_WORKER = ("load_device", "offload_device")


@dataclass(frozen=True)
class NodeLoader:
    """A node that loads a model and leaves no recipe, and whose call can be repeated.

    Args:
        file: its input with the name of the model file.
        folder: ComfyUI's kind of model folder in which it looks that up.
        settings: what it sets on the classes of the model's layers, for all models: each keeps its own on a rank.
    """

    file: str
    folder: str
    settings: tuple[str, ...] = ()


_SETTINGS = ("dequant_dtype", "patch_dtype")
NODE_LOADERS: Mapping[str, NodeLoader] = {
    # ComfyUI-GGUF.
    "UnetLoaderGGUF": NodeLoader("unet_name", "unet", _SETTINGS),
    "UnetLoaderGGUFAdvanced": NodeLoader("unet_name", "unet", _SETTINGS),
    # gguf, which has the same classes.
    "LoaderGGUF": NodeLoader("gguf_name", "unet", _SETTINGS),
    "LoaderGGUFAdvanced": NodeLoader("gguf_name", "unet", _SETTINGS),
}
"""By the id of the node, whose constructor takes nothing."""

FileStamp = tuple[int, ...]
"""State of a file: bytes, time of change of its content and of its inode in nanoseconds, number of the inode. Two of the same
size and time can still be told apart, whether the file was replaced or written to in place."""


@dataclass(frozen=True)
class Factory:
    """A function of a node pack that loads a model, and what ComfyUI called it with.

    Args:
        file: in which it stands at the top level.
        function: its name there; `Class.method` of a node.
        arguments: plain values, as `pool.protocol.flatten` writes them.
        place: of the model among the things that it returns; None = it returns the model alone.
        sources: files of the pack that ComfyUI's process has imported, each with its SHA-256.
        models: model files that the arguments name, each with its state.
        node: its id in NODE_LOADERS, where it is a node's.
    """

    file: str
    function: str
    arguments: Any
    place: int | None
    sources: tuple[tuple[str, str], ...]
    models: tuple[tuple[str, FileStamp], ...]
    node: str = ""


@dataclass(frozen=True)
class Recipe:
    """Everything a worker needs to load the UI's model.

    Args:
        loader: name of a function of `comfy.sd`, one of LOADERS or VAE_LOADERS, or FACTORY.
        path: model file.
        options: ComfyUI's `model_options`, plain values only (`dtype` by name).
        stamp: of the file when the UI process had loaded it.
        factory: where the loader is a function of a node pack.
        dynamic: DynamicVRAM has loaded the UI's model. Ranks do without, and give its weights the dtypes that it does.
    """

    loader: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    stamp: FileStamp = ()
    factory: Factory | None = None
    dynamic: bool = False

    @classmethod
    def from_json(cls, sent: Mapping[str, Any]) -> Recipe:
        """Rebuild a recipe from what `as_json` returned. Raises MirrorError: it is malformed."""
        try:
            recipe: Recipe = decode(cls, sent)
            return recipe
        except ValueError as error:
            raise MirrorError(f"malformed recipe: {error}") from error

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @cached_property
    def key(self) -> str:
        """Identifies recipe and file content."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]


def is_inside(path: str, folders: Iterable[str]) -> bool:
    """Return whether a file is in one of these folders. Links inside them may lead anywhere: the user made them."""
    plain = Path(os.path.abspath(path))
    return any(plain.is_relative_to(f) or plain.resolve().is_relative_to(Path(f).resolve()) for f in folders)


def file_digest(path: str) -> str:
    """Return the SHA-256 of a file. Raises MirrorError when it is gone."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise MirrorError(f"{path} cannot be read: {error.strerror}. Restart ComfyUI.") from error


def texts_in(tree: Any) -> list[str]:
    """Return every text inside lists and objects of JSON, such as the arguments of a Factory."""
    if isinstance(tree, str):
        return [tree]
    inner = tree if isinstance(tree, list) else tree.values() if isinstance(tree, dict) else ()
    return [text for item in inner for text in texts_in(item)]


def file_stamp(path: str) -> FileStamp:
    """Return the state of a file. Raises MirrorError when it is gone."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise MirrorError(f"the model file {path} cannot be read: {error.strerror}. Load a model that is there.") from error
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
