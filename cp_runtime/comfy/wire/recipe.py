"""How a model can be loaded again: the loader ComfyUI used, the file, and plain options.

Read off a model in the UI process (`comfy.ui.recipes`), followed by the ranks (`loading`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import MirrorError

LOADERS = ("load_diffusion_model", "load_checkpoint_guess_config")
DTYPE_OPTIONS = ("dtype", "weight_dtype")
OPTIONS = (*DTYPE_OPTIONS, "fp8_optimizations")
DECIDED_BY_WORKER = ("load_device", "offload_device")
FileStamp = tuple[int, ...]
"""State of a file: bytes, time of change of its content and of its inode in nanoseconds, number of the inode. Two of the same
size and time can still be told apart, whether the file was replaced or written to in place."""


@dataclass(frozen=True)
class Recipe:
    """Everything a worker needs to load the UI's model.

    Args:
        loader: name of a function of `comfy.sd`, one of LOADERS.
        path: model file.
        options: ComfyUI's `model_options`, plain values only (`dtype` by name).
        stamp: of the file when the UI process had loaded it.
    """

    loader: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    stamp: FileStamp = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def key(self) -> str:
        """Identifies recipe and file content."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]


def file_stamp(path: str) -> FileStamp:
    """The state of a file. Raises MirrorError when it is gone."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise MirrorError(f"the model file {path} cannot be read: {error.strerror}. Load a model that is there.") from error
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
