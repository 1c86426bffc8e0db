"""Carries what a process prints into the UI process's log."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

log = logging.getLogger("context_parallel")

_LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}


class LogPump:
    """A thread that copies the lines of one process to the log until it has ended, each with the process's name in front.

    Args:
        name: of the process.

    Attributes:
        fd: descriptor that the process writes to. It is this process's own while the pump is used as a context.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: deque[str] = deque(maxlen=12)
        read, self.fd = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(read,), name="context-parallel-log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(read)
            os.close(self.fd)
            raise

    def __enter__(self) -> LogPump:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def _run(self, read: int) -> None:
        with open(read, "rb") as lines:
            for line in lines:
                self._emit(line.decode(errors="replace").rstrip())

    def _emit(self, line: str) -> None:
        if not line:
            return
        name, separator, text = line.partition("|")
        level = _LEVELS.get(name) if separator else None
        line = text if level else line
        if not line.startswith("frame #"):  # of C++: dozens of them follow the line that says what is wrong
            self._last.append(line)
        log.log(level or logging.INFO, "[%s] %s", self._name, line)

    def finish(self) -> list[str]:
        """Let the last lines of a process that has ended arrive, and return them. A child of it may hold its output open."""
        self._thread.join(0.2)
        return list(self._last)
