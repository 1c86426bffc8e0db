"""Notes the state of a model's file at the moment when ComfyUI loads it, and keeps what does not fit in the file's pages.

The ranks load the same file later, perhaps hours later, and must find the same content. If the state were noted only then, a file
that was replaced in between would be taken for the one that ComfyUI holds.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import comfy.sd

from ...errors import MirrorError
from ..memory.ui_file_pages import guard_size
from ..memory.ui_host_memory import weights_in_file
from .ui_notes import notes_of
from .wire_recipe import LOADERS, FileStamp, file_stamp


def watch_loaders() -> None:
    """Wrap ComfyUI's loaders of diffusion models. Call it once.

    Nodes look them up in `comfy.sd` when they run, and a loader notes itself in `cached_patcher_init` by that name too. A pack that
    imported a loader by name before this pack was loaded goes past the wrapper; `recipe_of` says what happens then.
    """
    for name in LOADERS:
        setattr(comfy.sd, name, _stamping(getattr(comfy.sd, name)))


def _stamping(loader: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(loader)

    @functools.wraps(loader)
    def load(*args: Any, **kwargs: Any) -> Any:
        path = next(iter(signature.bind(*args, **kwargs).arguments.values()))
        before = _stamp(path)
        with weights_in_file(path) as in_file:
            loaded = loader(*args, **kwargs)
        patcher = loaded[0] if isinstance(loaded, tuple) else loaded
        if patcher is not None:  # a checkpoint may be loaded for its text encoder only
            notes_of(patcher.model).stamps = before, _stamp(path)
            if in_file and before:
                guard_size(patcher.model, path, before[0])
        return loaded

    return load


def _stamp(path: str) -> FileStamp:
    with suppress(MirrorError):  # a missing file is the loader's to report
        return file_stamp(path)
    return ()
