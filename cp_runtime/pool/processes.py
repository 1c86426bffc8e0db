"""Ranks' processes: starts them, ahead of their ranks where a prompt will need them, and says how they end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from subprocess import _args_from_interpreter_flags as interpreter_options  # type: ignore[attr-defined]  # multiprocessing uses it
from typing import Any, Protocol

from .config import WorkerSite
from .launcher import LogPump, memory_file

log = logging.getLogger("context_parallel")

PROGRAM = Path(__file__).with_name("rank_program.py")
_OWN = "CP_"  # names of variables that only our code reads, which a rank gets when it is told which one it is
_SAME_ORDER = {"PYTHONHASHSEED": "0"}  # of sets of strings, on all ranks
STACKS = getattr(signal, "SIGUSR1", 0)  # pools need Linux; elsewhere this is only imported


class RankProcess:
    """One rank's process.

    Attributes:
        log: takes what it prints.
        pid: 0 until it is known, on another machine.
        returncode: None while it runs; then as that of `subprocess.Popen`.
        error: what another machine says of its end.
    """

    def __init__(self, log: LogPump) -> None:
        self.log = log
        self.pid = 0
        self.returncode: int | None = None
        self.error: Exception | None = None
        self._ended, self._lock = threading.Event(), threading.Lock()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end; False if it runs on."""
        return self._ended.wait(timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended: its number may be another process's by then."""
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, number)

    @property
    def state(self) -> str:
        """What the kernel says it does: see `process_state`."""
        return process_state(self.pid)

    def write_stacks(self) -> None:
        """Have it write its stacks: its main thread, before it runs on, so that its stack is the one of the hang.

        A signal to the process goes to any thread once a stopped process runs again, and the main one has moved on by then.
        """
        tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc 2.30 and newer
        if tgkill is None:
            self.send_signal(STACKS)
        else:
            tgkill(self.pid, self.pid, STACKS)
        self.send_signal(signal.SIGCONT)  # a stopped one has to run to write

    def kill(self) -> None:
        """End it now."""
        self.send_signal(signal.SIGKILL)

    def ended(self, status: int, error: Exception | None = None) -> None:
        """Note that it has ended."""
        self.returncode, self.error = status, error
        self._ended.set()


class LocalProcess(RankProcess):
    """A child of this process. It imports what ranks need, then waits to be told which one it is.

    Raises:
        OSError, RuntimeError: the system has no room for it.
    """

    def __init__(self, site: WorkerSite, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, LogPump("rank") as log:
                super().__init__(log)
                self._send({"parent": os.getpid(), "path": site.path, "argv": site.argv, "preload": site.preload})
                started: Future[int] = Future()
                run = threading.Thread(target=self._run, args=(started, environment, theirs.fileno()), daemon=True)
                run.name = "context-parallel-rank"
                run.start()
                self.pid = started.result()
        except BaseException:
            self._socket.close()
            raise

    def begin(self, spec: dict[str, Any], environment: dict[str, str], fds: dict[str, int]) -> None:
        """Have it be a rank. `spec`: see `worker.Worker`. `fds`: descriptors that it inherits, by their names there."""
        self.log.name = f"rank {spec['rank']}"
        # It may have ended, or been killed: its channel will say so.
        with self._lock, self._socket, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if self._socket.fileno() != -1:
                self._send({**spec, "environment": environment, "descriptors": list(fds)}, *fds.values())

    def kill(self) -> None:
        with self._lock:
            self._socket.close()
        super().kill()

    def _send(self, message: dict[str, Any], *fds: int) -> None:
        with memory_file(json.dumps(message).encode()) as file:
            socket.send_fds(self._socket, [b"\0"], [file.fileno(), *fds])

    def _run(self, started: Future[int], environment: dict[str, str], fd: int) -> None:
        """Start it and wait for its end: a child that asked for a signal at its parent's death gets it when the *thread* that
        started it ends."""
        try:
            with open(os.devnull, "rb") as nothing:  # subprocess.DEVNULL stays open where a later descriptor cannot be had
                process = subprocess.Popen(
                    [sys.executable, *interpreter_options(), "-u", str(PROGRAM), str(fd)],
                    env=_SAME_ORDER | environment,
                    pass_fds=[fd],
                    stdin=nothing,
                    stdout=self.log.fd,
                    stderr=self.log.fd,
                    start_new_session=True,  # Ctrl-C in the terminal reaches this process only
                )
        except BaseException as error:  # noqa: BLE001  (raised where it is waited for)
            started.set_exception(error)
            return
        started.set_result(process.pid)
        with contextlib.suppress(ChildProcessError):  # code of others has waited for all children
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self.ended(process.wait())


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


def process_state(pid: int) -> str:
    """Return what the kernel says a process does, such as "sleeping" or "stopped"; "gone" if there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "gone"
    return next((line.partition("(")[2].rstrip(")") for line in lines if line.startswith("State:")), "unknown")


class OtherMachine(Protocol):
    """A machine that starts ranks."""

    def start(self, spec: dict[str, Any], environment: dict[str, str], fds: dict[str, int]) -> RankProcess:
        """Ask for a rank and return at once. It reads commands and writes reports as if it had inherited the descriptors."""


class OtherMachines(Protocol):
    """The machines that have joined, as `machines.host` provides them; without them all ranks are here."""

    @property
    def here(self) -> Mapping[str, OtherMachine]:
        """Those that are there now, by name."""

    @property
    def interface(self) -> dict[str, str]:
        """Variables by which ranks of this machine reach those of the others."""
