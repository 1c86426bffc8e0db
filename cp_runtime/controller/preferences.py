"""What a user has chosen in the panel, for graphs that say nothing of it. Kept for later sessions."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..pool.kept import KeptFile
from ..pool.typed import decode

NAME = "panel"


@dataclass(frozen=True)
class Preferences:
    """What can be chosen."""

    devices: str = ""  # as CP Config takes them; empty = all
    measure: bool = True  # a long run is compared with one device by itself


class KeptPreferences:
    """The choices, and their file. `file`: its path, from the user's cache folder."""

    def __init__(self, file: str | Path = "preferences.json") -> None:
        self._file, self.chosen = KeptFile(file), Preferences()
        entry = {name: value for name, value in self._file.read(NAME).get(NAME, {}).items() if name != "time"}
        with contextlib.suppress(ValueError):
            self.chosen = decode(Preferences, entry)

    def choose(self, **changes: Any) -> None:
        """Change some of them."""
        self.chosen = replace(self.chosen, **changes)
        self._file.put(NAME, NAME, asdict(self.chosen))
