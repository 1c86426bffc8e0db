"""A model's file on several machines: named by its place in the model folders, compared by its size and samples of its bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ...errors import MirrorError
from .wire_recipe import FACTORY, FileStamp, file_stamp

HEAD, WINDOWS, WINDOW = 1 << 20, 64, 1 << 12  # bytes of the file's begin, where its header is; samples of the rest
Folders = Mapping[str, Sequence[str]]
"""ComfyUI's model folders by kind."""


def describe(recipe: Mapping[str, Any], folders: Folders) -> dict[str, Any]:
    """Return what another machine needs to find the file of a recipe: kind of folder, name in it, size and digest."""
    path = str(recipe["path"])
    kind, name = _place(path, folders)
    return {"kind": kind, "name": name, "size": os.path.getsize(path), "digest": file_digest(path, file_stamp(path))}


def relocate(recipe: Mapping[str, Any], file: Mapping[str, Any], folders: Folders, machine: str) -> dict[str, Any]:
    """Return a recipe with the path and stamp that its file has on this machine.

    Raises:
        MirrorError: it is not here, or another one; or the recipe cannot be followed on another machine.
    """
    name, kind = str(file["name"]), str(file["kind"])
    if recipe["loader"] == FACTORY:
        raise MirrorError(
            f"{machine}: {name} was loaded by a node of another pack, which so far works on one computer only. Use Load "
            "Diffusion Model or Load Checkpoint, or name this computer's devices alone in devices of CP Config."
        )
    inside = [(folder, os.path.join(folder, name)) for folder in folders.get(kind, ())]
    paths = [path for folder, path in inside if os.path.isfile(path) and os.path.abspath(path).startswith(os.path.join(folder, ""))]
    if not kind or not paths:
        where = inside[0][1] if inside else f"the model folder {kind!r}"
        raise MirrorError(
            f"{machine} has no model file {name}. Copy it there, into {where}: for example, from the computer with ComfyUI, scp "
            f"{recipe['path']} {machine}:{where}"
        )
    path, stamp = paths[0], file_stamp(paths[0])
    if stamp[0] != file["size"] or file_digest(path, stamp) != file["digest"]:
        raise MirrorError(
            f"{machine} has another model file {name} ({stamp[0]} bytes) than ComfyUI's computer ({file['size']} bytes). Copy "
            f"it again: scp {recipe['path']} {machine}:{path}"
        )
    return {**recipe, "path": path, "stamp": list(stamp)}


@lru_cache(maxsize=64)
def file_digest(path: str, stamp: FileStamp) -> str:
    """Return the SHA-256 of a file's begin and of samples of the rest."""
    size, digest = stamp[0], hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(HEAD))
        for window in range(WINDOWS):
            file.seek(max(0, size - WINDOW) * window // (WINDOWS - 1))
            digest.update(file.read(WINDOW))
    return digest.hexdigest()


def _place(path: str, folders: Folders) -> tuple[str, str]:
    """Return (kind, name) of a file in the innermost folder that it is in; no kind where it is in none."""
    found = [
        (kind, os.path.relpath(path, folder))
        for kind, kept in folders.items()
        for folder in kept
        if path.startswith(os.path.join(os.path.abspath(folder), ""))
    ]
    return min(found, key=lambda place: len(place[1]), default=("", os.path.basename(path)))
