"""Notes the state of a model's file when ComfyUI loads it.

The ranks load the same file later, perhaps much later, and must find the same content. A file that was replaced in between may
have the same name, size and time of change, so what counts is what ComfyUI opened, and when.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import comfy.sd

from ...errors import MirrorError
from ..wire.recipe import LOADERS, FileStamp, file_stamp
from .model_notes import notes_of


def watch_loaders() -> None:
    """Wrap ComfyUI's loaders of diffusion models. Call it once.

    Nodes look them up in `comfy.sd` when they run, and so do the loaders themselves when they note in `cached_patcher_init`
    which function loaded a model. A pack that imported a loader by name before this one came gets no stamp, see `recipe_of`.
    """
    for name in LOADERS:
        setattr(comfy.sd, name, _stamping(getattr(comfy.sd, name)))


def _stamping(loader: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(loader)

    @functools.wraps(loader)
    def load(*args: Any, **kwargs: Any) -> Any:
        path = next(iter(signature.bind(*args, **kwargs).arguments.values()))
        before = _stamp(path)
        loaded = loader(*args, **kwargs)
        patcher = loaded[0] if isinstance(loaded, tuple) else loaded
        if patcher is not None:  # a checkpoint may be loaded for its text encoder only
            notes_of(patcher.model).stamps = before, _stamp(path)
        return loaded

    return load


def _stamp(path: str) -> FileStamp:
    with suppress(MirrorError):  # the loader has an error of its own for it
        return file_stamp(path)
    return ()
