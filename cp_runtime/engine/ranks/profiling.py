"""Ranges in torch's profiler traces, and one trace per rank on request (`CP_PROFILE`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.profiler
from torch.autograd.profiler import record_function

from ...compat import profiler_is_on
from ...errors import bad_value
from ...system.environment import own_setting

_NO_RANGE = nullcontext()


def trace_range(name: str, detail: str = "") -> AbstractContextManager[Any]:
    """Return a profiler range called "name detail"; without a profiler an empty context, as `record_function` costs 6 µs."""
    if not profiler_is_on():
        return _NO_RANGE
    return record_function(f"{name} {detail}" if detail else name)


class CallTraces:
    """Traces a rank's second to fourth call into `rank<N>.json` of the folder `CP_PROFILE`, for chrome://tracing or Perfetto.
    Raises ConfigError if the folder cannot be created."""

    def __init__(self, rank: int) -> None:
        self._profile: torch.profiler.profile | None = None
        folder = own_setting("CP_PROFILE")
        if not folder:
            return
        file = Path(folder, f"rank{rank}.json")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            remedy = f"Name another one ({error.strerror})."
            raise bad_value("CP_PROFILE", folder, "a folder that can be written to", remedy) from error
        # The first call also moves weights and connects groups.
        calls = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
        self._profile = torch.profiler.profile(schedule=calls, on_trace_ready=lambda made: made.export_chrome_trace(str(file)))
        self._profile.start()

    @contextmanager
    def call(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._profile is not None:
                self._profile.step()
