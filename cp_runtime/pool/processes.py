"""Ranks' processes: starts them, ahead of their ranks where a prompt will need them, and says how they end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ..system import system
from ..system.processes import process_state
from ..system.programs import Program, interpreter_options
from .config import WorkerSite
from .frames import Frame, Malformed, Outbox, Reader
from .launcher import LogPump

log = logging.getLogger("context_parallel")

PROGRAM = Path(__file__).with_name("rank_program.py")
_OWN = "CP_"  # names of variables that only our code reads, which a rank gets when its number is assigned
SAME_ORDER = {"PYTHONHASHSEED": "0"}  # of sets of strings, on all ranks

OnFrame = Callable[[Frame | Malformed | None], None]
"""Takes what a rank sends, in the thread that reads it; at last None: it has ended."""


class RankProcess:
    """A child of this process that is a rank, or leads to one. It imports what ranks need, then waits for its number.

    Attributes:
        log: takes what it prints.
        pid: of the rank.
        returncode: None while it runs; then as that of `system.programs.Program`.
        error: why it ended, where its exit code says less.

    Raises:
        OSError, RuntimeError: the system has no room for it.
    """

    def __init__(self, command: list[str], environment: dict[str, str], site: dict[str, Any]) -> None:
        self.returncode: int | None = None
        self.error: Exception | None = None
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._on_frame: OnFrame = lambda frame: None
        with LogPump("rank") as self.log:
            started: Future[tuple[int, Outbox]] = Future()
            threading.Thread(
                target=self._run, args=(started, command, environment), name="context-parallel-rank", daemon=True
            ).start()
            self._child, self._outbox = started.result()
            self.pid = self._child
        self.send(Frame(json.dumps(site).encode()))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end; False if it runs on."""
        return self._ended.wait(timeout)

    @property
    def state(self) -> str:
        """What the kernel says it does, such as "sleeping" or "stopped"; "gone" where there is no such process."""
        return process_state(self.pid)

    def ended(self, status: int) -> None:
        """Note that it has ended."""
        self.returncode = status
        self._ended.set()

    def begin(self, spec: dict[str, Any], environment: dict[str, str], on_frame: OnFrame) -> None:
        """Assign a rank to this process. `spec`: see `worker.Worker`."""
        self.log.name = f"rank {spec['rank']}"
        with self._lock:  # it may have ended, or been killed
            self._on_frame = on_frame
            if self.returncode is not None:
                on_frame(None)
        self.send(Frame(json.dumps({**spec, "environment": environment}).encode()))

    def send(self, frame: Frame) -> None:
        """Send it a frame. Never waits; nothing happens where it has ended."""
        self._outbox.put(frame)

    def send_signal(self, number: int) -> None:
        """Send a signal to the child, unless it has ended."""
        with self._lock:
            if self.returncode is None:  # else its number may be another process's
                system.send_signal(self._child, number)

    def kill(self) -> None:
        """End it now."""
        self._outbox.close()
        self.send_signal(system.KILL)

    def read_greeting(self, reader: Reader) -> None:
        """Read what precedes the frames of a rank."""

    def _run(self, started: Future[tuple[int, Outbox]], command: list[str], environment: dict[str, str]) -> None:
        """Start it, read what it sends, and wait for its end. This thread must not end before: see `system.die_with_parent`."""
        try:
            process, outbox, source = _start(command, environment, self.log.fd)
        except BaseException as error:  # noqa: BLE001  (raised where it is waited for)
            started.set_exception(error)
            return
        started.set_result((process.pid, outbox))
        try:
            reader = Reader(source)
            self.read_greeting(reader)
            while (frame := reader.read()) is not None:
                self._on_frame(frame)
        except Malformed as error:
            self._on_frame(error)
        finally:
            os.close(source)
        system.wait_for(process)
        with self._lock:
            self.ended(process.wait())
            self._on_frame(None)
        outbox.close()


class LocalProcess(RankProcess):
    """A rank's process on this computer."""

    def __init__(self, site: WorkerSite, environment: dict[str, str]) -> None:
        command = [sys.executable, *interpreter_options(), "-u", str(PROGRAM)]
        super().__init__(command, SAME_ORDER | environment, site_message(site))


def site_message(site: WorkerSite) -> dict[str, Any]:
    """Return the first message to a rank, before it has a number."""
    return {"parent": os.getpid(), "path": site.path, "argv": site.argv, "preload": site.preload}


def _start(command: list[str], environment: dict[str, str], errors: int) -> tuple[Program, Outbox, int]:
    """Start a program. Returns it, what writes to it, and the descriptor that it is read from. `errors`: that of its log."""
    with contextlib.ExitStack() as kept, contextlib.ExitStack() as given:

        def pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
            ends = os.pipe()
            for stack, fd in zip((reader, writer), ends, strict=True):
                stack.callback(os.close, fd)
            return ends

        (commands, target), (source, reports) = pipe(given, kept), pipe(kept, given)
        process = system.start(command, environment, commands, reports, errors)
        try:
            outbox = Outbox(target)
        except RuntimeError:
            process.kill()
            process.wait()
            raise
        kept.pop_all()
    return process, outbox, source


class Waiting:
    """Processes that wait to be ranks, all of one site and environment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: list[LocalProcess] = []
        self._key: Any = None

    def start(self, site: WorkerSite, environment: dict[str, str], count: int) -> None:
        """Have `count` processes import what ranks need, and wait. Raises OSError or RuntimeError: the system has no room."""
        with self._lock:
            self._fill(site, environment, count)

    def take(self, site: WorkerSite, environment: dict[str, str], count: int) -> list[LocalProcess]:
        """Return `count` processes, those that wait first; what is left of these ends. Raises as `start` does."""
        with self._lock:
            self._fill(site, environment, count)
            taken, self._processes = self._processes[:count], self._processes[count:]
            self._end()
            return taken

    def _fill(self, site: WorkerSite, environment: dict[str, str], count: int) -> None:
        key = site.path, site.argv, site.preload, {name: v for name, v in environment.items() if not name.startswith(_OWN)}
        if key != self._key:
            self._end()
        self._key, self._processes = key, [process for process in self._processes if process.returncode is None]
        try:
            while len(self._processes) < count:
                self._processes.append(LocalProcess(site, environment))
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes = []


WAITING = Waiting()
