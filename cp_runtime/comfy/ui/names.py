"""What a model is called: for people by its file, for records of times by how it was loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from ...nested import stored
from ..shared.fingerprint import PLAIN, plain_text
from ..shared.modules import full_name, type_name
from ..shared.weights import network_of
from .runtime import model_folders
from .values import value_of


def name_of(patcher: Any) -> str:
    """Return the name of a model's file, as ComfyUI's loaders show it; of its class, where it is not from a file that is known."""
    path = next(iter(files_of(patcher)), None)
    return type(network_of(patcher.model)).__name__ if path is None else in_folder(path)[1]


def files_of(patcher: Any) -> list[str]:
    """Return the paths of a model's files, as far as they are known."""
    init = patcher.cached_patcher_init
    given = [each for each in (init[1] if init else ()) if isinstance(each, str) and os.path.isabs(each)]
    return [each for each in dict.fromkeys((*given, *value_of(patcher.model).files)) if os.path.isfile(each)]


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


def in_folder(path: str) -> tuple[str, str]:
    """Return the kind of the innermost model folder around a file, and its name there; outside of all, no kind."""
    found = [
        (kind, os.path.relpath(path, folder))
        for kind, folders in model_folders().items()
        for folder in {each for given in folders for each in (os.path.abspath(given), os.path.realpath(given))}
        if path.startswith(os.path.join(folder, ""))
    ]
    return min(found, key=lambda each: len(each[1]), default=("", os.path.basename(path)))
