"""Code that nodes inject into a model, in ComfyUI's process. The ranks inject it for the time of a call: see `rank.injections`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import comfy.model_management


@contextmanager
def injected(patcher: Any) -> Iterator[None]:
    """Have a patcher's injected code be in its model, while active."""
    injections = list(chain(*patcher.injections.values()))
    for each in injections:
        each.inject(patcher)
    try:
        yield
    finally:
        for each in injections:
            each.eject(patcher)


@contextmanager
def ejected(model: Any) -> Iterator[None]:
    """Have the code that loaded patchers of a model have injected be out of it, while active: ComfyUI takes it out with the next
    load."""
    patchers = [patcher for each in comfy.model_management.current_loaded_models if (patcher := each.model) is not None]
    patchers += [patcher.cp_loaded for patcher in patchers if getattr(patcher, "cp_loaded", None) is not None]
    found = [patcher for patcher in patchers if patcher.model is model and patcher.is_injected]
    for patcher in found:
        patcher.eject_model()
    try:
        yield
    finally:
        for patcher in found:
            patcher.inject_model()
