"""What calls took, kept by devices and driver, so that a new ComfyUI need not try again."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from ..engine.cost import AttentionShape
from ..engine.policy import CallSplit, CallWork, Known, Run
from .kept import KeptFile


class CallTimes:
    """Known kinds of calls on one machine.

    Args:
        machine: says in words what the times depend on: devices, driver, torch, backend, shares.
        file: where they are kept; None = in the user's cache folder.
    """

    def __init__(self, machine: str, file: Path | None = None) -> None:
        self._machine, self._file = machine, KeptFile("calls.json", file)
        self._known: dict[str, Known] = {}
        for kind, entry in self._file.read(machine).items():
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                self._known[kind] = _known_of(entry)

    def get(self, kind: str) -> Known | None:
        """What is known of a kind of call."""
        return self._known.get(kind)

    def put(self, kind: str, known: Known) -> None:
        """Know a kind of call from now on, in this process."""
        self._known[kind] = known

    def save(self, kind: str) -> None:
        """Keep what is known of a kind of call on disk."""
        self._file.put(self._machine, kind, _entry_of(self._known[kind]))


def _entry_of(known: Known) -> dict[str, Any]:
    work = {**asdict(known.work), "attentions": [[astuple(shape), count] for shape, count in known.work.attentions]}
    runs = [[asdict(split), asdict(run)] for split, run in known.runs.items()]
    return {"work": work, "default": asdict(known.default), "runs": runs}


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
