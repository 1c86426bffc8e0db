"""Carries what ranks print into the UI process's log."""

from __future__ import annotations

import logging
import os
import selectors
import threading
from collections import deque
from collections.abc import Sequence

log = logging.getLogger("context_parallel")

_LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}


class Lines:
    """Output of one process, cut into lines for the log, each with the process's name in front. `name`: of the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending = bytearray()
        self.last: deque[str] = deque(maxlen=12)

    def add(self, data: bytes) -> None:
        """Log what came; empty = the output has ended."""
        self._pending += data
        *lines, rest = bytes(self._pending).split(b"\n")
        self._pending[:] = rest
        for line in lines if data else [*lines, rest]:
            self._emit(line.decode(errors="replace").rstrip())

    def _emit(self, line: str) -> None:
        if not line:
            return
        name, separator, text = line.partition("|")
        level = _LEVELS.get(name) if separator else None
        line = text if level else line
        self.last.append(line)
        log.log(level or logging.INFO, "[%s] %s", self._name, line)


class LogPump:
    """A thread that copies lines of processes to the log until every one has ended. `outputs`: descriptors to read, which the
    thread closes. `names`: of the processes."""

    def __init__(self, outputs: Sequence[int], names: Sequence[str]) -> None:
        self._selector = selectors.DefaultSelector()
        self._lines = [Lines(name) for name in names]
        for fd, lines in zip(outputs, self._lines, strict=True):
            self._selector.register(fd, selectors.EVENT_READ, lines)
        self.thread = threading.Thread(target=self._run, name="context-parallel-log", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                data = os.read(key.fd, 1 << 16)
                key.data.add(data)
                if not data:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
        self._selector.close()

    def finish(self) -> None:
        """Let the last lines of processes that have ended arrive. A child of theirs may hold its output open."""
        self.thread.join(0.2)

    def last_lines(self, process: int = 0) -> list[str]:
        """Return the last lines that a process printed."""
        self.finish()
        return list(self._lines[process].last)
