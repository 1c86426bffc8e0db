"""The versions of ComfyUI that the pack was tested with, and all switches between them.

Where ComfyUI's code shows a capability, the caller checks for that instead of a version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TESTED = ("0.30.0", "0.33.0")
"""Oldest first. A plan or a test for a newer version names it with `since`."""

RECORDING = ("disable_cuda_graphs", "disable_comfy_compiler")
"""Command-line switches of recorders that repeat a forward: CUDA graphs per block (0.33), the compiler of allocations (0.34).
Neither can record collectives or another process's computations."""


def forbid_recording(args: Any) -> dict[str, bool]:
    """Disable ComfyUI's recording, and return the old switches in `args`, which ComfyUI reads when a forward begins."""
    before = {name: value for name, value in vars(args).items() if name in RECORDING}
    vars(args).update(dict.fromkeys(before, True))
    return before


@contextmanager
def unrecorded(args: Any) -> Iterator[None]:
    """Disable ComfyUI's recording while active; see `forbid_recording`."""
    before = forbid_recording(args)
    try:
        yield
    finally:
        vars(args).update(before)
