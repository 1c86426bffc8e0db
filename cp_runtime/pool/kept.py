"""Files in the user's cache folder that save ComfyUI from measuring the same things again.

A file is a convenience: what is no entry of this version counts as absent and is replaced; one that cannot be read now stays.
Several processes may write one: each reads it anew under a lock, puts its own entry in, and renames a new file over it. A home on a
network may hang, and another process may hold the lock, so reading and writing have a moment: after it nothing is known, and new
entries are dropped.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .launcher import cache_folder
from .protocol import is_number

log = logging.getLogger("context_parallel")

VERSION = 2
MAX_ENTRIES = 500  # the oldest of more are removed
MAX_BYTES = 1 << 20  # of a file that is read: twice the size of MAX_ENTRIES. Nothing else runs in this process meanwhile
PATIENCE = 0.2  # seconds that a prompt waits for a file
LONGEST = 1e9  # seconds; more are not believed
DAY = 86400.0  # seconds

Entry = dict[str, Any]
T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class KeptFile:
    """Entries by machine and name. `path`: of the file, from the user's cache folder."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(cache_folder()) / path

    def read(self, machine: str) -> dict[str, Entry]:
        """Return the entries of a machine by name."""
        return (_in_a_moment(self._read) or {}).get(machine, {})

    def put(self, machine: str, name: str, entry: Entry) -> None:
        """Keep an entry, unless that takes long. A disk that is full or read-only is no error."""
        _in_a_moment(partial(self._put, machine, name, entry))

    def _put(self, machine: str, name: str, entry: Entry) -> None:
        os.makedirs(self._file.parent, exist_ok=True)
        with self._locked():
            machines = {group: entries for group, entries in self._read().items() if entries}
            machines.setdefault(machine, {})[name] = {**entry, "time": time.time()}
            oldest = sorted((e["time"], group, name) for group, entries in machines.items() for name, e in entries.items())
            for _, group, gone in oldest[: max(0, len(oldest) - MAX_ENTRIES)]:
                del machines[group][gone]
            new = self._file.with_suffix(".new")  # one name: the next process removes what a killed one leaves
            new.unlink(missing_ok=True)
            try:
                with open(new, "x") as file:  # neither waits for the reader of a pipe, nor writes where a link leads
                    file.write(json.dumps({"version": VERSION, "machines": machines}))
                os.replace(new, self._file)
            finally:
                new.unlink(missing_ok=True)

    def _read(self) -> dict[str, dict[str, Entry]]:
        try:
            with open(os.open(self._file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
                    return {}
                content = json.loads(file.read(MAX_BYTES))
            machines = content["machines"] if content["version"] == VERSION else {}
            latest = time.time() + DAY  # clocks differ
            return {
                machine: {
                    name: entry
                    for name, entry in entries.items()
                    if isinstance(entry, dict) and is_number(entry.get("time")) and entry["time"] < latest
                }
                for machine, entries in machines.items()
            }
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            return {}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # Linux only, as pools are

        until = time.monotonic() + PATIENCE / 2  # the rest is for reading and writing
        flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(self._file.with_suffix(".lock"), flags, 0o600), "r+") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.005)
            yield


_hung: threading.Thread | None = None  # the thread that works with a file and did not finish in time


def _in_a_moment(work: Callable[[], T]) -> T | None:
    """Do work that nobody waits for longer than a moment: a system call on a file system that hangs cannot be interrupted.

    Returns None where it failed, took too long, or an earlier one still hangs.
    """
    global _hung
    done: list[T] = []

    def run() -> None:
        try:
            done.append(work())
        except OSError as error:
            log.debug("a file of the cache is not written: %s", error)

    if _hung is not None and _hung.is_alive():
        return None
    thread = threading.Thread(target=run, name="kept files", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        _hung = thread
        log.debug("a file of the cache is not read or written: the file system does not answer")
    return done[0] if done else None


def remember(known: dict[K, V], name: K, value: V, most: int = MAX_ENTRIES) -> None:
    """Put a value into a dict as its newest. With more than `most` values, forget the oldest."""
    known.pop(name, None)
    known[name] = value
    if len(known) > most:
        del known[next(iter(known))]


SAMPLES = 9  # that are kept of a time: the newest


class KeptSamples(dict[str, tuple[float, ...]]):
    """Times of things on one machine, as often as they were measured, in seconds, by name. `machine`: says in words what they
    depend on."""

    def __init__(self, file: KeptFile, machine: str) -> None:
        self._file, self._machine = file, machine
        for name, entry in file.read(machine).items():
            given = entry.get("samples")
            samples = given[-SAMPLES:] if isinstance(given, list) else []
            if samples and all(is_number(each) and 0 < each < LONGEST for each in samples):
                self[name] = tuple(map(float, samples))

    def add(self, name: str, seconds: float) -> None:
        """Record one more, and keep it on disk."""
        samples = (*self.get(name, ()), seconds)[-SAMPLES:]
        remember(self, name, samples)
        self._file.put(self._machine, name, {"samples": samples})
