"""What calls took, kept by devices and driver, so that a new ComfyUI need not try again."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..engine.policy import CallSplit, CallWork, Known, Run
from .kept import LONGEST, KeptFile
from .typed import decode

MOST_ATTENTIONS = 100  # kinds of them in a call that is believed: a prediction goes through all
MOST_HEADS = 1 << 14  # of an attention that is believed: so many numbers are tried
SHORTEST = 1e-6  # seconds of a call that are believed


class CallTimes(dict[str, Known]):
    """What is known of kinds of calls on one machine, by name.

    Args:
        machine: says in words what the times depend on: devices, driver, torch, backend, shares.
        world_size: number of ranks; what is kept of other ranks counts as absent.
        file: where they are kept; None = in the user's cache folder.
    """

    def __init__(self, machine: str, world_size: int, file: Path | None = None) -> None:
        self._machine, self._file = machine, KeptFile("calls.json", file)
        super().__init__()
        for kind, entry in self._file.read(machine).items():
            with contextlib.suppress(ValueError):
                self[kind] = _known_of(entry, world_size)

    def save(self, kind: str) -> None:
        """Keep what is known of a kind of call on disk."""
        known = self[kind]
        runs = [[asdict(split), asdict(run)] for split, run in known.runs.items()]
        self._file.put(self._machine, kind, {"work": asdict(known.work), "default": asdict(known.default), "runs": runs})


def _known_of(entry: dict[str, Any], world_size: int) -> Known:
    """Raises ValueError where it is none of so many ranks."""
    work, default = decode(CallWork, entry.get("work")), decode(CallSplit, entry.get("default"))
    runs = dict(decode(tuple[tuple[CallSplit, Run], ...], entry.get("runs")))
    everyone, sizes = tuple(range(world_size)), [size for shape, _ in work.attentions for size in vars(shape).values()]
    for split in (default, *runs):
        at_work = split.at_work  # 0 where a degree is
        if split.ranks[:1] != (0,) or not set(split.ranks) <= set(everyone) or tuple(sorted(set(split.ranks))) != split.ranks:
            raise ValueError(split)
        if not at_work or len(split.ranks) % at_work or split.batch > work.items:
            raise ValueError(split)
    if default.ranks != everyone or not work.items or not all(sizes) or len(work.attentions) > MOST_ATTENTIONS:
        raise ValueError(entry)
    if not all(SHORTEST <= run.seconds < LONGEST for run in runs.values()):
        raise ValueError(runs)
    if any(shape.heads > MOST_HEADS or shape.heads % shape.kv_heads for shape, _ in work.attentions):
        raise ValueError(work.attentions)
    # A single run on all ranks may have been slow for what happened once. It is predicted again where ranks have measured anew.
    return Known(work, default, {split: run for split, run in runs.items() if run.count or split != default})
