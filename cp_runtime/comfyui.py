"""The versions of ComfyUI that the pack was tested with, and all that is switched between them.

Where a look at ComfyUI tells what it can do, the code looks there and no version is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TESTED = ("0.30.0", "0.33.0")
"""Oldest first. A plan or a test of something newer than the first names its own version, `since`."""

RECORDING = ("disable_cuda_graphs", "disable_comfy_compiler")
"""Command-line switches of what records a forward to repeat it: CUDA graphs per block (0.33), the compiler of allocations (0.34).
Neither can record collectives or what another process computes."""


def forbid_recording(args: Any) -> dict[str, bool]:
    """Have ComfyUI record nothing from now on, and return the switches as they were. `args`: `comfy.cli_args.args`, which ComfyUI
    reads whenever a forward begins."""
    before = {name: value for name, value in vars(args).items() if name in RECORDING}
    vars(args).update(dict.fromkeys(before, True))
    return before


@contextmanager
def unrecorded(args: Any) -> Iterator[None]:
    """Have ComfyUI record nothing meanwhile; see `forbid_recording`."""
    before = forbid_recording(args)
    try:
        yield
    finally:
        vars(args).update(before)
