"""The only table of times: (kind of call, who computed it) -> seconds. Choice, report, panel and Measure all read it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..cache import MAX_ENTRIES, CacheFile
from ..nested import tensors
from ..recent import Recent

SAMPLES = 9  # newest samples kept of a time
LATEST = 3  # of these count for a choice: the least of them, so a single late call does not count, and a slower machine does
SHORTEST, LONGEST = 1e-6, 1e9  # seconds; others are discarded
PICTURE = 4  # dimensions of a tensor with pictures or videos: batch, channels, rows and columns


def digest(*words: object) -> str:
    """Return a name for some values, the same in every process."""
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]


def kind_of(key: str, arguments: Mapping[str, Any]) -> str:
    """Return the name of the kind of a call: calls of one kind take the same time on the same ranks.

    Kinds differ in the shapes of tensors that become tokens: the latent, which is the first argument, pictures and videos, and
    everything given as a list, one entry for each reference. Not in those of texts, whose length changes with every prompt and
    hardly counts.

    Args:
        key: of the model.
        arguments: by name; the first one is the latent.
    """
    counting = [
        tuple(tensor.shape)
        for place, value in enumerate(arguments.values())
        for tensor in tensors(value)
        if place == 0 or isinstance(value, list) or tensor.ndim >= PICTURE
    ]
    return digest(key, counting)


class Times:
    """Seconds by kind of call and who computed it. Written to disk by `save`. `path`: of the file, from the user's cache folder."""

    def __init__(self, path: str | Path = "times.json") -> None:
        self._file = CacheFile(path)
        self._changed: Recent[str, tuple[float, ...]] = Recent(MAX_ENTRIES)
        read = {name: given for name, entry in self._file.read().items() if (given := _samples(entry))}
        self._samples = Recent(MAX_ENTRIES, read)

    def of(self, kind: str, who: str) -> tuple[float, ...]:
        return self._samples.get(_name(kind, who), ())

    def add(self, kind: str, who: str, seconds: float) -> None:
        if SHORTEST <= seconds < LONGEST:
            name, samples = _name(kind, who), (*self.of(kind, who), float(f"{seconds:.6g}"))[-SAMPLES:]
            self._samples[name] = self._changed[name] = samples

    def forget(self, kind: str, who: str) -> None:
        if self._samples.pop(_name(kind, who), ()):
            self._changed[_name(kind, who)] = ()

    def save(self) -> None:
        if self._changed:
            self._file.put({name: list(samples) for name, samples in self._changed.items()})
            self._changed.clear()


def least(samples: tuple[float, ...]) -> float:
    return min(samples[-LATEST:])


def _name(kind: str, who: str) -> str:
    return f"{kind} {who}"


def _samples(entry: Any) -> tuple[float, ...]:
    """Return the samples of an entry of the file; none where it is malformed."""
    given = entry[-SAMPLES:] if isinstance(entry, list) else []
    good = all(isinstance(each, (int, float)) and not isinstance(each, bool) and SHORTEST <= each < LONGEST for each in given)
    return tuple(map(float, given)) if good else ()
