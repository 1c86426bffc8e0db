"""Stacks of all ranks, for the error of a call that did not end in time.

A rank writes its own at a signal, from the signal's handler: it needs neither Python's lock nor a rank that listens.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .launcher import is_own

SIGNAL = getattr(signal, "SIGUSR1", 0)  # pools need Linux; elsewhere this is only imported
PREFIX = "context-parallel-stacks-"
KEEP = 5  # files of this user
PATIENCE = 0.4  # seconds that ranks get to write


def stacks_file(directory: Path, rank: int) -> Path:
    """Where a rank writes its stacks."""
    return directory / f"stacks-{rank}"


def collect_stacks(directory: Path, processes: Sequence[subprocess.Popen[bytes]], title: str) -> Path:
    """Make every rank that lives write its stacks and put them together. The ranks are to be killed afterwards.

    Returns:
        the file, in the folder for temporary files, readable by this user.

    Raises:
        OSError: it cannot be written, such as without room or descriptors.
    """
    states = [process_state(process.pid) for process in processes]
    for process in processes:
        if process.poll() is None:
            _signal_main_thread(process.pid)
            process.send_signal(signal.SIGCONT)  # a stopped one has to run to write
    deadline = time.monotonic() + PATIENCE
    sizes: list[int] = []
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, sizes = sizes, [_size(stacks_file(directory, rank)) for rank in range(len(processes))]
        if all(sizes) and sizes == before:
            break
    handle, name = tempfile.mkstemp(prefix=PREFIX, suffix=".txt")
    with os.fdopen(handle, "w") as out:
        out.write(f"{title}\n")
        for rank, (process, state) in enumerate(zip(processes, states, strict=True)):
            out.write(f"\n=== rank {rank}, pid {process.pid}, {state}\n")
            with contextlib.suppress(OSError):
                out.write(stacks_file(directory, rank).read_text(errors="replace"))
    _remove_old()
    return Path(name)


def _signal_main_thread(pid: int) -> None:
    """Send SIGNAL to the main thread: it writes before it runs on, so that its stack is the one of the hang.

    A signal to the process goes to any thread once a stopped process runs again, and the main one has moved on by then.
    """
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc 2.30 and newer
    if tgkill is None:
        os.kill(pid, SIGNAL)
    else:
        tgkill(pid, pid, SIGNAL)


def process_state(pid: int) -> str:
    """What the kernel says a process does, such as "sleeping" or "stopped"; "gone" where there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "gone"
    return next((line.partition("(")[2].rstrip(")") for line in lines if line.startswith("State:")), "unknown")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _remove_old() -> None:
    own = [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*.txt") if is_own(path)]
    for path in sorted(own, key=lambda path: path.lstat().st_mtime)[:-KEEP]:
        path.unlink(missing_ok=True)
