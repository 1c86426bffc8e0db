"""The progress of a rank: a heartbeat ten times a second, and at the start of every long step."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from .messages import Beat

BEAT = 0.1  # seconds between two heartbeats
SILENT = 2.0  # seconds without a heartbeat after which a process must be stopped, or something in it holds the GIL
STDERR = 2
_NONE = Beat()


@dataclass(frozen=True)
class Progress:
    """Position of a rank in its command at its last heartbeat. `beat`: time of that, on the clock of `time.monotonic`; 0 = none
    yet."""

    at: Beat = _NONE
    beat: float = 0.0


class Watch:
    """A timer that writes the stacks of all threads to standard error at a command's deadline. It needs neither the GIL nor a
    live Python thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = self._armed = 0.0  # on the clock of `time.monotonic`; 0 = never

    def until(self, deadline: float) -> None:
        """Set the deadline; 0 = none. A running timer with an earlier one is reset by the next `look`."""
        with self._lock:
            self._until = deadline
            if deadline and not 0 < self._armed <= deadline:
                self._arm()

    def extend(self, seconds: float) -> None:
        """Extend the deadline."""
        with self._lock:
            self._until += seconds if self._until else 0.0

    def look(self) -> None:
        """Correct the timer. To be called several times a second."""
        with self._lock:
            # Not for less: each time faulthandler ends a thread and starts another.
            if abs(self._until - self._armed) > BEAT:
                self._arm()

    def _arm(self) -> None:
        self._armed = self._until
        if self._until:
            faulthandler.dump_traceback_later(max(0.01, self._until - time.monotonic()), file=STDERR)
        else:
            faulthandler.cancel_dump_traceback_later()


class Notes:
    """A rank's notes on its command, and the thread that sends them until the process ends. It pauses while the process is
    stopped, or something holds the GIL.

    Args:
        send: sends a heartbeat, with the number of the command; 0 = none.
        collectives: counts those that this rank has begun.
        load_timeout: seconds that a command may take, at least, in which a model is brought to the device.
    """

    def __init__(
        self, send: Callable[[Beat, int], None], collectives: Callable[[], int], watch: Watch, load_timeout: float
    ) -> None:
        self._send, self._collectives, self._watch, self._load_timeout = send, collectives, watch, load_timeout
        self.modules, self._loaded, self._has_loaded, self._compiling = 0, -1, False, 0
        self._began = self._compiles_since = time.monotonic()
        self._command, self._seconds = 0, 0.0
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def begin(self, command: int = 0, seconds: float = 0.0) -> None:
        """Note the start of a command with this time limit, or the end of one."""
        self._command, self._began, self._seconds = command, time.monotonic(), seconds
        self.modules, self._loaded, self._has_loaded, self._compiling = 0, -1, False, 0

    def load(self, loaded: int | None) -> None:
        """Note the loaded thousandths of a model; None = the load is over."""
        first, self._has_loaded, self._loaded = not self._has_loaded, True, -1 if loaded is None else loaded
        if first:
            self._watch.until(self._began + max(self._seconds, self._load_timeout))
        if first or loaded is None:
            self._beat()

    def compiling(self, part: int) -> None:
        """Note the compilation of a part of a model, whose time does not count. `part`: counts from 1; 0 = it is over."""
        now = time.monotonic()
        if self._compiling:
            self._watch.extend(now - self._compiles_since)
        self._compiling, self._compiles_since = part, now
        self._beat()

    def _beat(self) -> None:
        command = self._command  # first: what is read after it may be of the next one, but not of one before
        beat = Beat(
            modules=self.modules,
            collectives=self._collectives(),
            loaded=None if self._loaded < 0 else self._loaded,
            has_loaded=self._has_loaded,
            compiling=self._compiling,
        )
        self._send(beat, command)

    def _run(self) -> None:
        while True:
            self._beat()
            if self._compiling:  # for as long as it takes
                now = time.monotonic()
                self._watch.extend(now - self._compiles_since)
                self._compiles_since = now
            self._watch.look()
            time.sleep(BEAT)
