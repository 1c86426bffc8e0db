"""A dict with a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """A dict that forgets the oldest entries. An entry that is assigned again becomes the newest.

    Args:
        limit: number of entries that it keeps.
        entries: the first ones, the oldest first.
    """

    def __init__(self, limit: int, entries: Mapping[K, V] | None = None) -> None:
        super().__init__()
        self.limit = limit
        for key, value in (entries or {}).items():
            self[key] = value

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self.limit:
            del self[next(iter(self))]
