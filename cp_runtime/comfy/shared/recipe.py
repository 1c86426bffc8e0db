"""The recipe to load a model again: the loader that ComfyUI used, the file, and plain options.

Read off a model in the UI process (`ui.recipes`), followed by the ranks (`loading`, `rank.factory`). On other machines the file is
named by its path in the model folders, and compared by its size and a digest of all its bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from ...errors import ChangedFileError, MirrorError
from ...pool.digests import content_digest
from ...pool.protocol import decode
from .modules import LOADER_SETTINGS

LOADERS = ("load_diffusion_model", "load_checkpoint_guess_config")
VAE_LOADERS = ("load_vae_patcher", "load_checkpoint_vae_patcher")
FACTORY = "factory"
DTYPE_OPTIONS = ("dtype", "weight_dtype")
OPTIONS = (*DTYPE_OPTIONS, "fp8_optimizations")
REMEDY = "Use Load Diffusion Model or Load Checkpoint, or Unet Loader (GGUF) of ComfyUI-GGUF."
"""For loaders that workers cannot repeat."""
DECIDED_BY_WORKER = ("load_device", "offload_device")


@dataclass(frozen=True)
class NodeLoader:
    """A node that loads a model and leaves no recipe, and whose call can be repeated.

    Args:
        file: its input with the name of the model file.
        folder: ComfyUI's kind of model folder for that name.
        settings: attributes that it sets on the classes of the model's layers, for all models: on a rank each model has its own.
    """

    file: str
    folder: str
    settings: tuple[str, ...] = ()


NODE_LOADERS: Mapping[str, NodeLoader] = {
    # ComfyUI-GGUF.
    "UnetLoaderGGUF": NodeLoader("unet_name", "unet", LOADER_SETTINGS),
    "UnetLoaderGGUFAdvanced": NodeLoader("unet_name", "unet", LOADER_SETTINGS),
    # gguf, which has the same classes.
    "LoaderGGUF": NodeLoader("gguf_name", "unet", LOADER_SETTINGS),
    "LoaderGGUFAdvanced": NodeLoader("gguf_name", "unet", LOADER_SETTINGS),
}
"""By the id of the node, whose constructor takes no arguments."""

FileStamp = tuple[int, ...]
"""Bytes of a file, times of change of its content and its inode in ns, and its inode: a write in place or a replacement shows."""


@dataclass(frozen=True)
class Factory:
    """A function of a node pack that loads a model, and ComfyUI's arguments to it.

    Args:
        folder: ComfyUI's folder of node packs, of its pack.
        file: with the function at its top level.
        function: its name there; `Class.method` of a node.
        arguments: plain values, as `pool.protocol.flatten` writes them.
        place: index of the model in the returned tuple; None = it returns the model alone.
        models: model files that the arguments name, each with its state.
        node: its id in NODE_LOADERS, where it is a node's.
    """

    folder: str
    file: str
    function: str
    arguments: Any
    place: int | None
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
        dynamic: DynamicVRAM has loaded the UI's model. Ranks do without it, but give the weights its dtypes.
    """

    loader: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    stamp: FileStamp = ()
    factory: Factory | None = None
    dynamic: bool = False

    @classmethod
    def from_json(cls, sent: Mapping[str, Any]) -> Recipe:
        """Rebuild a recipe from `as_json`. Raises MirrorError if it is malformed."""
        try:
            recipe: Recipe = decode(cls, sent)
            return recipe
        except ValueError as error:
            raise MirrorError(f"malformed recipe: {error}") from error

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def files(self) -> dict[str, FileStamp]:
        return {self.path: self.stamp} | dict(self.factory.models if self.factory is not None else ())

    @cached_property
    def key(self) -> str:
        """Key of recipe and file content."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]


def texts_in(tree: Any) -> list[str]:
    """Return every text inside lists and objects of JSON, such as the arguments of a Factory."""
    if isinstance(tree, str):
        return [tree]
    inner = tree if isinstance(tree, list) else tree.values() if isinstance(tree, dict) else ()
    return [text for item in inner for text in texts_in(item)]


def file_stamp(file: str | int) -> FileStamp:
    """Return the state of a file, by path or descriptor. Raises MirrorError if it is gone."""
    with readable(file):
        found = os.stat(file)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def date(nanoseconds: int) -> str:
    """Return a file's time as text, the same on all machines."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(nanoseconds / 1e9))


@contextmanager
def readable(path: str | int) -> Iterator[None]:
    """Raise MirrorError with the name of a model file, where the system raises OSError."""
    try:
        yield
    except OSError as error:
        raise MirrorError(f"the model file {path} cannot be read: {error.strerror}. Load a model that is there.") from error


Folders = Mapping[str, Sequence[str]]
"""ComfyUI's model folders by kind."""


def describe(recipe: Mapping[str, Any], folders: Folders) -> dict[str, Any]:
    """Return kind of folder, name in it, size, time and digest, by which another machine finds the file of a recipe.

    In any thread. A file that is new here is read as a whole: a minute for 60 GB on a fast disk. Raises MirrorError if it is gone,
    ChangedFileError if it is not the one that ComfyUI loaded.
    """
    path = str(recipe["path"])
    kind, name = place_of(path, folders)
    stamp, digest = _digested(path)
    if list(stamp) != list(recipe["stamp"]):
        raise ChangedFileError(f"{path} changed on disk after ComfyUI had loaded it. Queue the prompt again: it is loaded anew.")
    return {"kind": kind, "name": name, "size": stamp[0], "written": stamp[1], "digest": digest}


def relocate(recipe: Mapping[str, Any], file: Mapping[str, Any], folders: Folders, machine: str) -> dict[str, Any]:
    """Return a recipe with the path and stamp of its file on this machine. In any thread; it takes as long as `describe`.

    Raises:
        MirrorError: it is not here, or another one; or the recipe cannot be followed on another machine.
        ChangedFileError: it is written to now.
    """
    name, kind = str(file["name"]), str(file["kind"])
    if recipe["loader"] == FACTORY or recipe.get("factory") is not None:
        raise MirrorError(
            f"{machine}: {name} was loaded by a node of another pack, which so far works on one computer only. Use Load "
            "Diffusion Model or Load Checkpoint, or name this computer's devices alone in devices of CP Config."
        )
    inside = [(folder, os.path.join(folder, name)) for folder in folders.get(kind, ())]
    paths = [path for folder, path in inside if os.path.isfile(path) and os.path.abspath(path).startswith(os.path.join(folder, ""))]
    if not kind or not paths:
        where = inside[0][1] if inside else f"the model folder {kind!r}"
        raise MirrorError(
            f"{machine} has no model file {name}. Copy it there, into {where}: for example, from the computer with ComfyUI, "
            f"{_copy(recipe['path'], machine, where)}"
        )
    path, stamp, digest = paths[0], file_stamp(paths[0]), ""
    if stamp[0] == file["size"]:
        stamp, digest = _digested(path)
    if digest != file["digest"]:
        raise MirrorError(
            f"{machine} has another model file {name} than ComfyUI's computer: {_shown(stamp[0], stamp[1], digest)}; there "
            f"{_shown(file['size'], file['written'], file['digest'])}. Copy it again: {_copy(recipe['path'], machine, path)}"
        )
    return {**recipe, "path": path, "stamp": list(stamp)}


def _digested(path: str) -> tuple[FileStamp, str]:
    """Return the state of a file, and the digest of its content. Raises ChangedFileError if it is written to meanwhile."""
    stamp = file_stamp(path)
    with readable(path):
        digest = content_digest(path, stamp)
    if file_stamp(path) != stamp:
        raise ChangedFileError(f"{path} changed on disk while it was read. Wait until it is complete, and queue the prompt again.")
    return stamp, digest


def _shown(size: int, written: int, digest: str) -> str:
    return f"{size} bytes, written {date(written)}" + (f", digest {digest[:12]}" if digest else "")


def _copy(path: str, machine: str, where: str) -> str:
    """Return commands that copy a file to another machine. They replace a file that ranks there may use, and do not write to it."""
    rename = shlex.join(["mv", f"{where}.new", where])
    return f"{shlex.join(['scp', path, f'{machine}:{where}.new'])} && {shlex.join(['ssh', machine, rename])}"


def place_of(path: str, folders: Folders) -> tuple[str, str]:
    """Return (kind, name) of a file in the innermost model folder around it; no kind outside of all."""
    found = [
        (kind, os.path.relpath(path, folder))
        for kind, kept in folders.items()
        for folder in kept
        if path.startswith(os.path.join(os.path.abspath(folder), ""))
    ]
    return min(found, key=lambda place: len(place[1]), default=("", os.path.basename(path)))
