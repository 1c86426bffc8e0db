"""What must never be unpickled."""

import os
from pathlib import Path
from typing import Any


class Evil:
    """What unpickling of it does, it does at once: make a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)
