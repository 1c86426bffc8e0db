"""Named ranges for torch's profiler, and for NVTX under `torch.autograd.profiler.emit_nvtx`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd.profiler import record_function

from ..compat import profiler_is_on

_NO_RANGE = nullcontext()


def trace_range(name: str, detail: str = "") -> AbstractContextManager[Any]:
    """A range called "name detail". Without a profiler it is an empty context: `record_function` alone would cost 6 µs."""
    if not profiler_is_on():
        return _NO_RANGE
    return record_function(f"{name} {detail}" if detail else name)
