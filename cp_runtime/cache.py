"""Files in the user's cache folder with results that are expensive to find again.

A file is a convenience: anything but a file of this version counts as absent and is replaced. A disk that is full or read-only is
no error. Two ComfyUIs may write one file: each reads it anew and renames a new one over it, so at most an entry of that moment is
lost, and no reader sees half of a file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from .system import system
from .system.environment import cache_root

log = logging.getLogger("context_parallel")

VERSION = 3
MAX_ENTRIES = 1500  # older ones are removed
MAX_BYTES = 1 << 20  # of a file to read: while JSON is read, nothing else runs in this process


def cache_folder() -> str:
    """Return this user's cache folder for this pack."""
    return os.path.join(cache_root(), "comfyui-context-parallel")


class CacheFile:
    """Entries by name, the oldest first. `path`: of the file, from the user's cache folder."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(cache_folder()) / path

    def read(self) -> dict[str, Any]:
        try:
            return self._read()
        except OSError as error:
            log.debug("%s is not read: %s", self._file.name, error)
            return {}

    def put(self, entries: dict[str, Any]) -> None:
        """Add entries, or replace those of the same names."""
        try:
            kept = {name: entry for name, entry in self._read().items() if name not in entries} | entries
            self._write({name: kept[name] for name in list(kept)[-MAX_ENTRIES:]})
        except OSError as error:  # also where it could not be read just now: its entries must stay
            log.debug("%s is not written: %s", self._file.name, error)

    def _read(self) -> dict[str, Any]:
        try:
            with open(os.open(self._file, system.OPEN_NONBLOCKING), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
                    return {}
                content = json.loads(file.read(MAX_BYTES))
            entries = content["entries"] if content["version"] == VERSION else {}
            return entries if isinstance(entries, dict) else {}
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            return {}
        except (ValueError, KeyError, TypeError, RecursionError):
            return {}

    def _write(self, entries: dict[str, Any]) -> None:
        os.makedirs(self._file.parent, exist_ok=True)
        descriptor, new = tempfile.mkstemp(dir=self._file.parent, prefix=f"{self._file.stem}-")
        try:
            with open(descriptor, "w") as file:
                file.write(json.dumps({"version": VERSION, "entries": entries}))
            os.replace(new, self._file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise
