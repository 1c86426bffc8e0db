"""What a model is called: for people by its file, for records of times by how it was loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from ...nested import stored
from ..shared.fingerprint import PLAIN, plain_text, type_name
from ..shared.modules import full_name
from ..shared.weights import network_of
from .runtime import model_folders
from .values import value_of


def name_of(patcher: Any) -> str:
    """Return the name of a model's file, as ComfyUI's loaders show it; of its class, where it is not from a file that is known."""
    init = patcher.cached_patcher_init
    given = [each for each in (init[1] if init else ()) if isinstance(each, str) and os.path.isabs(each)]
    path = next((each for each in (*given, *value_of(patcher.model).files) if os.path.isfile(each)), None)
    return type(network_of(patcher.model)).__name__ if path is None else _in_folder(path)


def kind_of(patcher: Any) -> str:
    """Return a key that models have in common which were loaded alike."""
    init, network = patcher.cached_patcher_init, network_of(patcher.model)
    how = [full_name(init[0]), _plain(init[1])] if init else []
    sizes = [part.nbytes for weight in network.parameters() for part in stored(weight)]
    return hashlib.blake2b(repr((how, type_name(network), sizes)).encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return plain_text(value)
    if isinstance(value, Mapping):
        return [(str(key), _plain(each)) for key, each in value.items()]
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else type_name(value)


def _in_folder(path: str) -> str:
    """Return the name of a file in the innermost model folder around it."""
    found = [
        os.path.relpath(path, folder)
        for folders in model_folders().values()
        for folder in folders
        if path.startswith(os.path.join(os.path.abspath(folder), ""))
    ]
    return min(found, key=len, default=os.path.basename(path))
