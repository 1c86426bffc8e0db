"""Weights of the UI process that are the pages of the model's file: those that the ranks share, and those that fit nowhere else.

Without DynamicVRAM ComfyUI copies a model's weights into memory of its own. A file that fits is left to it: what is copied does not
depend on the file any more. One that does not fit would end ComfyUI, so its weights are the mapped file, as those of the ranks are:
every process can have the pages, and the system can drop them. The mapping is private, so that whatever changes a weight in place
gets a page of its own. With DynamicVRAM ComfyUI maps the file itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.memory_management
import comfy.model_management
import psutil

from ...engine.weights.files import MAPPED
from ...engine.weights.pages import give_back, mapped
from ...errors import UnsupportedError
from ..shared.files import ModelFiles
from ..shared.loading import adopt, file_backed_weights, load_recipe, parameters_of
from ..shared.recipe import DTYPE_OPTIONS, Recipe
from ..shared.weights import same_weight
from .runtime import reloading_changed_files

log = logging.getLogger("context_parallel")

SHARE = 0.8  # fraction of the free memory that a file may take: text encoders and pictures need some, too
GROUPS = Path("/sys/fs/cgroup")
# Control groups, version 2 and version 1: the folder, and the files for the limit, the use, and the pages of files in use.
_VERSIONS = (
    (GROUPS, "memory.max", "memory.current", ("active_file", "inactive_file")),
    (GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


@contextlib.contextmanager
def weights_in_file(path: str) -> Iterator[bool]:
    """Have ComfyUI's loaders leave the weights of a file that does not fit where they are, inside the context. Yields whether it is
    such a file."""
    ours = sys.platform == "linux" and not comfy.memory_management.aimdo_enabled and path.lower().endswith(MAPPED)
    if not ours or _bytes(path) <= SHARE * free_host_memory():
        yield False
        return
    log.info(
        "%s (%.1f GB) does not fit into the %.1f GB of free memory: its weights stay in the pages of the file",
        os.path.basename(path),
        _bytes(path) / 1e9,
        free_host_memory() / 1e9,
    )
    with file_backed_weights():
        yield True


def free_host_memory(groups: str = "/proc/self/cgroup") -> int:
    """Return the bytes of memory that this process can still take, of the machine and of the container that it may run in.
    `groups`: file that names its control groups."""
    return min([int(psutil.virtual_memory().available), *_free_in_groups(groups)])


def _free_in_groups(groups: str) -> Iterator[int]:
    try:
        names = [line.split(":", 2) for line in Path(groups).read_text().splitlines()]
    except OSError:
        return
    for version, (root, limit, used, files) in enumerate(_VERSIONS):
        name = next((path for _, kinds, path in names if ("memory" in kinds.split(",") if version else not kinds)), None)
        if name is None:
            continue
        group = root / name.lstrip("/")
        for folder in (group, *group.parents):  # a group's limit holds for the groups in it
            if folder == root.parent:
                break
            with contextlib.suppress(OSError, ValueError, KeyError):  # no limit is "max", and the first group has no such files
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                taken = int((folder / used).read_text()) - sum(int(stat[kind]) for kind in files)
                yield max(0, int((folder / limit).read_text()) - taken)


def _bytes(path: str) -> int:
    with contextlib.suppress(OSError):  # a missing file is the loader's to report
        return os.path.getsize(path)
    return 0


def share_file_pages(patcher: Any, recipe: Recipe) -> int:
    """Point the UI's own copy of plain weights at the mapped file; returns the bytes of private memory given back.

    The UI process does not compute with them, but other branches of a graph may, so they must stay valid. What the loader converted
    is a `CastWeight` then, until ComfyUI is about to compute with it or to save it.

    Raises:
        UnsupportedError: a weight is not the file's, so the workers do not have it.
        ChangedFileError: the file is not the one that was loaded.
    """
    model = patcher.model
    if comfy.memory_management.aimdo_enabled or patcher.backup or model.current_weight_patches_uuid is not None:
        return 0  # mapped already, or in use by a branch that runs without context parallelism
    on_device = not comfy.model_management.is_device_cpu(patcher.load_device)
    converts = not on_device and not recipe.options.keys().isdisjoint(DTYPE_OPTIONS)
    if recipe.factory is not None or converts or not recipe.path.lower().endswith(MAPPED):
        return 0  # the file's pages are not the weights, or need not be
    fresh, missing, files = load_recipe(recipe, cast_later=on_device)
    weights = {name: weight for name, weight in fresh.model.diffusion_model.named_parameters() if name not in missing}
    released = 0
    own = parameters_of(model.diffusion_model)
    for name, module, parameter in own:
        current, file = getattr(module, parameter), weights.get(name)
        if file is not None and (current.dtype, current.shape) == (file.dtype, file.shape) and not same_weight(current, file):
            raise UnsupportedError(
                f"something changed the weight {name} in place after ComfyUI had loaded it, and the workers have it as it is in "
                f"{os.path.basename(recipe.path)}. Remove the node that did so and load the model again."
            )
    give_back(weights.values(), mapped(recipe.path))  # all of them have been read
    guard(model, files)
    for name, module, parameter in own:
        if adopt(module, parameter, weights.get(name)):
            released += weights[name].nbytes
    return released


def guard(model: Any, files: ModelFiles) -> None:
    """Check before ComfyUI uses a model, and after each of its calls, that its files are as they were loaded.

    ComfyUI asks a model for its dtype before it loads it and in every call, whichever patcher it uses.
    """
    owner, stock = weakref.ref(model), type(model)

    @reloading_changed_files()
    def get_dtype() -> Any:
        files.check()
        return stock.get_dtype(owner())

    @reloading_changed_files()
    def apply_model(*args: Any, **kwargs: Any) -> Any:
        with files.unchanged():
            return stock.apply_model(owner(), *args, **kwargs)

    model.get_dtype, model.apply_model = get_dtype, apply_model
