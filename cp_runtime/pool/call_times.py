"""What calls took, kept in the user's cache folder by devices and driver, so that a new ComfyUI need not try again.

The file is a convenience: one that cannot be read or is of another version counts as empty, and is replaced. Several processes may
write it: each reads it anew under a lock, puts its own kind of call in, and renames a new file over it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from ..engine.cost import AttentionShape
from ..engine.policy import CallSplit, CallWork, Known, Run
from .launcher import cache_folder

log = logging.getLogger("context_parallel")

VERSION = 1
MAX_KINDS = 500  # of calls that are kept; the oldest go


class CallTimes:
    """Known kinds of calls on one machine.

    Args:
        machine: says in words what the times depend on: devices, driver, torch, backend, shares.
        file: where they are kept; None = in the user's cache folder.
    """

    def __init__(self, machine: str, file: Path | None = None) -> None:
        self._machine = machine
        self._file = file or Path(cache_folder(), "calls.json")
        self._known: dict[str, Known] = {}
        for kind, entry in self._read().get(machine, {}).items():
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                self._known[kind] = _known_of(entry)

    def get(self, kind: str) -> Known | None:
        """What is known of a kind of call."""
        return self._known.get(kind)

    def put(self, kind: str, known: Known) -> None:
        """Know a kind of call from now on, in this process."""
        self._known[kind] = known

    def save(self, kind: str) -> None:
        """Keep what is known of a kind of call on disk. A disk that is full or read-only is no error."""
        try:
            os.makedirs(self._file.parent, exist_ok=True)
            with self._locked():
                machines = self._read()
                entries = machines.setdefault(self._machine, {})
                entries[kind] = _entry_of(self._known[kind])
                oldest = sorted((entry["time"], name, kind) for name, kinds in machines.items() for kind, entry in kinds.items())
                for _, name, gone in oldest[: max(0, len(oldest) - MAX_KINDS)]:
                    del machines[name][gone]
                with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False) as new:
                    json.dump({"version": VERSION, "machines": machines}, new)
                os.replace(new.name, self._file)
        except OSError as error:
            log.debug("the times of calls are not kept: %s", error)

    def _read(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Entries by machine and kind, those that look like some."""
        try:
            content = json.loads(self._file.read_text())
            machines = content["machines"] if content["version"] == VERSION else {}
            return {
                machine: {kind: e for kind, e in kinds.items() if isinstance(e, dict) and isinstance(e.get("time"), (int, float))}
                for machine, kinds in machines.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # Linux has it, and only there are pools

        with open(self._file.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _entry_of(known: Known) -> dict[str, Any]:
    work = {**asdict(known.work), "attentions": [[astuple(shape), count] for shape, count in known.work.attentions]}
    runs = [[asdict(split), asdict(run)] for split, run in known.runs.items()]
    return {"time": time.time(), "work": work, "default": asdict(known.default), "runs": runs}


def _known_of(entry: dict[str, Any]) -> Known:
    """Raises ValueError, TypeError or KeyError where it is none."""
    attentions = tuple((AttentionShape(*shape), int(count)) for shape, count in entry["work"]["attentions"])
    runs = {}
    for split, run in entry["runs"]:
        runs[_split_of(split)] = made = Run(**run)
        if not all(isinstance(value, (int, float)) and 0 <= value < 1e9 for value in astuple(made)):
            raise ValueError(run)
    return Known(CallWork(**{**entry["work"], "attentions": attentions}), _split_of(entry["default"]), runs)


def _split_of(value: dict[str, Any]) -> CallSplit:
    split = CallSplit.from_json(value)
    numbers = () if split is None else (*split.ranks, split.batch, split.ring, split.ulysses)
    if split is None or not split.ranks or split.ranks[0] != 0 or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise ValueError(value)
    if not split.at_work or len(split.ranks) % split.at_work or list(split.ranks) != sorted(set(split.ranks)):
        raise ValueError(value)
    return split
