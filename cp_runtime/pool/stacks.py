"""Stacks of all ranks, for the error of a call that did not end in time.

A rank writes its own at a signal, from the signal's handler: it needs neither the GIL nor a rank that listens.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ..version import VERSION
from .forking import RankProcess

PREFIX = "context-parallel-stacks-"
KEEP = 5  # files of this user
PATIENCE = 0.6  # seconds that ranks get to write
QUIET = 0.15  # seconds without another byte after which all is written; a rank writes its main thread last


def collect_stacks(files: Sequence[int], processes: Sequence[RankProcess], title: str) -> Path:
    """Make every rank that lives write its stacks and put them together. The ranks are to be killed afterwards.

    Args:
        files: descriptors of the files that the ranks write to.

    Returns:
        the file, in the folder for temporary files, readable by this user.

    Raises:
        OSError: it cannot be written, such as without room or descriptors.
    """
    states = [process.state for process in processes]
    asked = []
    for fd, process in zip(files, processes, strict=True):
        if process.returncode is None:
            process.write_stacks()
            asked.append(fd)
    _wait_written(asked)
    handle, name = tempfile.mkstemp(prefix=PREFIX, suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as out:
        out.write(f"{title}\nVersion {VERSION}\n")
        for rank, (process, state, fd) in enumerate(zip(processes, states, files, strict=True)):
            out.write(f"\n=== rank {rank}, pid {process.pid}, {state}\n")
            out.write(os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace"))
    _remove_old()
    return Path(name)


def _wait_written(files: Sequence[int]) -> None:
    """Wait until all have written and none still writes, for PATIENCE seconds at most."""
    now = time.monotonic()
    deadline, quiet_since, sizes = now + PATIENCE, now, [0] * len(files)
    while now < deadline and not (all(sizes) and now - quiet_since >= QUIET):
        time.sleep(0.03)
        before, sizes, now = sizes, [os.fstat(fd).st_size for fd in files], time.monotonic()
        if sizes != before:
            quiet_since = now


def _remove_old() -> None:
    """Remove all but the newest files of this user. Other processes do so, too: a file that one of them has removed is no error."""
    own = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*.txt"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode):
                own.append((found.st_mtime, path))
    for _, path in sorted(own)[:-KEEP]:
        with contextlib.suppress(OSError):
            path.unlink()
