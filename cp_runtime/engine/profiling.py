"""Ranges in torch's profiler traces, and one trace per rank on request (`CP_PROFILE`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.profiler
from torch.autograd.profiler import record_function

from ..compat import profiler_is_on
from ..errors import bad_value

TRACED = (2, 3, 4)  # numbers of calls; the first one also moves weights and connects groups
_NO_RANGE = nullcontext()


def trace_range(name: str, detail: str = "") -> AbstractContextManager[Any]:
    """Return a profiler range called "name detail"; without a profiler an empty context, as `record_function` costs 6 µs."""
    if not profiler_is_on():
        return _NO_RANGE
    return record_function(f"{name} {detail}" if detail else name)


class CallTraces:
    """Traces a rank's second to fourth call into `rank<N>.json`, for chrome://tracing or Perfetto.

    Args:
        folder: where to write, created if missing; None or empty = nothing is traced.
        rank: number of this rank.

    Raises:
        ConfigError: the folder cannot be created.
    """

    def __init__(self, folder: str | None, rank: int) -> None:
        self._file = Path(folder, f"rank{rank}.json") if folder else None
        self._calls = 0
        self._profile: torch.profiler.profile | None = None
        if self._file is not None:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise bad_value(
                    "CP_PROFILE", folder, "a folder that can be written to", f"Name another one ({error.strerror})."
                ) from error

    @classmethod
    def from_environment(cls, rank: int) -> CallTraces:
        """Trace if `CP_PROFILE` names a folder."""
        return cls(os.environ.get("CP_PROFILE"), rank)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Trace one call."""
        self._calls += 1
        if self._file is None or self._calls not in TRACED:
            yield
            return
        if self._profile is None:
            self._profile = torch.profiler.profile()
            self._profile.start()
        try:
            yield
        finally:
            if self._calls == TRACED[-1]:
                self._profile.stop()
                self._profile.export_chrome_trace(str(self._file))
                self._profile = None
