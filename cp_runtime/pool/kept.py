"""Files in the user's cache folder that keep from one ComfyUI to the next what would have to be measured again.

A file is a convenience: one that cannot be read or is of another version counts as empty, and is replaced. Several processes may
write it: each reads it anew under a lock, puts its own entry in, and renames a new file over it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .launcher import cache_folder

log = logging.getLogger("context_parallel")

VERSION = 1
MAX_ENTRIES = 500  # that are kept; the oldest go

NEWS = 0.05  # part by which a time differs from the one that is kept, so that it is worth writing

Entry = dict[str, Any]


class KeptFile:
    """Entries by machine and name.

    Args:
        name: of the file.
        path: where it is; None = in the user's cache folder.
    """

    def __init__(self, name: str, path: Path | None = None) -> None:
        self._file = path or Path(cache_folder(), name)

    def read(self, machine: str) -> dict[str, Entry]:
        """Entries of a machine by name, those that look like some."""
        return self._read().get(machine, {})

    def put(self, machine: str, name: str, entry: Entry) -> None:
        """Keep an entry. A disk that is full or read-only is no error."""
        try:
            os.makedirs(self._file.parent, exist_ok=True)
            with self._locked():
                machines = self._read()
                machines.setdefault(machine, {})[name] = {"time": time.time(), **entry}
                oldest = sorted((e["time"], group, name) for group, entries in machines.items() for name, e in entries.items())
                for _, group, gone in oldest[: max(0, len(oldest) - MAX_ENTRIES)]:
                    del machines[group][gone]
                with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False) as new:
                    json.dump({"version": VERSION, "machines": machines}, new)
                os.replace(new.name, self._file)
        except OSError as error:
            log.debug("%s is not kept: %s", self._file.name, error)

    def _read(self) -> dict[str, dict[str, Entry]]:
        try:
            content = json.loads(self._file.read_text())
            machines = content["machines"] if content["version"] == VERSION else {}
            return {
                machine: {
                    name: entry
                    for name, entry in entries.items()
                    if isinstance(entry, dict) and isinstance(entry.get("time"), (int, float))
                }
                for machine, entries in machines.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # Linux has it, and only there are pools

        with open(self._file.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class KeptSeconds:
    """What something took, by name, on one machine.

    Args:
        file: where it is kept.
        machine: says in words what the times depend on.
    """

    def __init__(self, file: KeptFile, machine: str) -> None:
        self._file, self._machine = file, machine
        self._seconds: dict[str, float] = {}
        self._written: dict[str, float] = {}
        for name, entry in file.read(machine).items():
            seconds = entry.get("seconds")
            if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < 1e9:
                self._seconds[name] = self._written[name] = seconds

    def get(self, name: str) -> float | None:
        """What it took; None where nobody knows."""
        return self._seconds.get(name)

    def know(self, name: str, seconds: float) -> None:
        """Know what it took, in this process."""
        self._seconds.pop(name, None)
        self._seconds[name] = seconds
        if len(self._seconds) > MAX_ENTRIES:
            del self._seconds[next(iter(self._seconds))]

    def put(self, name: str, seconds: float) -> None:
        """Know and keep what it took."""
        self.know(name, seconds)
        if abs(seconds - self._written.get(name, 0.0)) > NEWS * seconds:
            self._written[name] = seconds
            self._file.put(self._machine, name, {"seconds": seconds})
