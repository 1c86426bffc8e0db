"""Starts ranks: this process's side of the fork server.

Importing what a rank needs takes seconds; a fork takes none. So one process imports it once, for all ranks of all pools that start
from the same place and environment, and stays for those that are restarted.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from subprocess import _args_from_interpreter_flags as interpreter_options  # type: ignore[attr-defined]  # multiprocessing uses it
from typing import Any, Protocol

from ..errors import PoolError
from .config import WorkerSite
from .launcher import LogPump, memory_file

log = logging.getLogger("context_parallel")

PROGRAM = Path(__file__).with_name("fork_server.py")
_OWN = "CP_"  # names of variables that only our code reads, after the fork
# One thread, and no device: a process with either cannot be forked. Ranks get the environment as it is.
_FIT_TO_FORK = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_MESSAGE = 1 << 12
STACKS = getattr(signal, "SIGUSR1", 0)  # pools need Linux; elsewhere this is only imported
_ANSWERS_WITHIN = 0.5  # seconds in which a fork server that does nothing else forks a rank
_ENDS_WITHIN = 5.0  # seconds in which the kernel ends the ranks of a fork server that is gone


class RankProcess:
    """One rank's process, which is no child of this one.

    Attributes:
        log: takes what it prints.
        pid: 0 until it is forked.
        returncode: None while it runs; then as that of `subprocess.Popen`.
        error: why it was not forked, or that its fork server ended and it with that.
    """

    def __init__(self, server: ForkServer, log: LogPump) -> None:
        self.server, self.log = server, log
        self.pid = 0
        self.returncode: int | None = None
        self.error: Exception | None = None
        self._answered, self._ended, self._lock = threading.Event(), threading.Event(), threading.Lock()

    def wait_started(self, timeout: float) -> bool:
        """Wait until it is forked; False if it is not yet. Raises OSError: the system has no room; PoolError: the fork server
        ended."""
        answered = self._answered.wait(timeout)
        if self.error is not None and not self.pid:
            raise self.error
        return answered

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end; False if it runs on."""
        if not self._ended.is_set():
            self.server.wake()
        return self._ended.wait(timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended: its number may be another process's by then."""
        with self._lock:
            if self.returncode is None and self.pid:
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

    def kill(self, patience: float = _ANSWERS_WITHIN) -> None:
        """End it now; if it is not forked within `patience` seconds, end its fork server."""
        if not self._answered.wait(max(0.0, patience)):
            self.server.kill()
        self.send_signal(signal.SIGKILL)

    def started(self, pid: int) -> None:
        """Note that the fork server has forked it."""
        self.pid = pid
        self._answered.set()

    def ended(self, status: int, error: Exception | None = None) -> None:
        """Note that it ended. With an error, it was not forked, or lost its fork server."""
        with self._lock:
            self.returncode, self.error = status, error
        self._ended.set()
        self._answered.set()


class ForkServer:
    """The process that imports what ranks need, and forks them. Its start returns at once; it imports meanwhile. `environment`:
    of the ranks. `ready`: it has imported all, and forked a rank."""

    def __init__(self, site: WorkerSite, environment: dict[str, str]) -> None:
        self.ready = False
        self._numbers = itertools.count()
        self._ranks: dict[int, RankProcess] = {}  # those that have not ended
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        spec = {"parent": os.getpid(), "path": site.path, "argv": site.argv, "preload": site.preload}
        launched: Future[None] = Future()
        try:
            with theirs, LogPump("fork server") as self._log, memory_file(json.dumps(spec).encode()) as file:
                run = partial(self._run, launched, environment, theirs.fileno(), file.fileno())
                threading.Thread(target=run, name="context-parallel-fork-server", daemon=True).start()
                launched.result()
        except BaseException:
            self._socket.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def state(self) -> str:
        """What the kernel says it does."""
        return process_state(self.pid)

    @property
    def alive(self) -> bool:
        """Whether it can start ranks, or will."""
        return self._process.returncode is None

    def start(self, spec: dict[str, Any], environment: dict[str, str], fds: dict[str, int]) -> RankProcess:
        """Ask for a rank and return at once. `spec`: see `worker.Worker`. `fds`: descriptors that it inherits, by their names
        there."""
        content = {**spec, "environment": environment, "descriptors": list(fds)}
        with LogPump(f"rank {spec['rank']}") as log, memory_file(json.dumps(content).encode()) as file:
            number, rank = next(self._numbers), RankProcess(self, log)
            self._ranks[number] = rank
            try:
                request = json.dumps({"start": number}).encode()
                socket.send_fds(self._socket, [request], [file.fileno(), log.fd, *fds.values()])
            except OSError as error:
                self._ranks.pop(number, None)
                gone = isinstance(error, BrokenPipeError) or not self.alive
                rank.ended(-signal.SIGKILL, self._gone() if gone else error)
        return rank

    def leave(self) -> None:
        self._send(leave=True)

    def wake(self) -> None:
        """Let it run on where a signal has stopped it: it can neither fork a rank nor say that one has ended."""
        if process_state(self.pid) == "stopped":
            log.warning(
                "the process that ranks are forked from (pid %d) was stopped by a signal (state T); it runs on now", self.pid
            )
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._socket.send(json.dumps(message).encode())

    def _run(self, launched: Future[None], environment: dict[str, str], socket_fd: int, spec_fd: int) -> None:
        """Start it and take its answers until it ends: a child that asked for a signal at its parent's death gets it when the
        *thread* that started it ends."""
        try:
            with open(os.devnull, "rb") as nothing:  # subprocess.DEVNULL stays open where a later descriptor cannot be had
                self._process = subprocess.Popen(
                    [sys.executable, *interpreter_options(), "-u", str(PROGRAM), str(socket_fd), str(spec_fd)],
                    env={**_FIT_TO_FORK, **environment},
                    pass_fds=[socket_fd, spec_fd],
                    stdin=nothing,
                    stdout=self._log.fd,
                    stderr=self._log.fd,
                    start_new_session=True,
                )
        except BaseException as error:  # noqa: BLE001  (raised where it is waited for)
            launched.set_exception(error)
            return
        launched.set_result(None)
        with contextlib.closing(self._socket):
            with contextlib.suppress(OSError):
                while data := self._socket.recv(_MESSAGE):
                    self._take(json.loads(data))
            self._process.wait()
            for rank in list(self._ranks.values()):
                _wait_gone(rank.pid)
                rank.ended(-signal.SIGKILL, self._gone())
            self._ranks.clear()

    def _take(self, answer: dict[str, Any]) -> None:
        number = answer["id"]
        self.ready |= "pid" in answer
        if number not in self._ranks:
            return  # `start` has given it up: its channel is closed, at which a rank ends
        if "pid" in answer:
            self._ranks[number].started(answer["pid"])
            return
        rank = self._ranks.pop(number)
        if "errno" in answer:
            rank.ended(-signal.SIGKILL, OSError(answer["errno"], os.strerror(answer["errno"])))
            return
        rank.ended(answer["status"])
        self._send(reap=rank.pid)

    def _gone(self) -> PoolError:
        lines = "\n".join(self._log.finish())
        return PoolError(
            f"the process that ranks are forked from (pid {self.pid}) ended, exit code {self._process.poll()}. It is started again "
            "on next use." + (f"\n\nWhat it wrote last:\n{lines}" if lines else "")
        )


def kill_all(processes: Iterable[RankProcess]) -> None:
    """End ranks now. End a fork server as well where it does not fork its ranks in time."""
    until = time.monotonic() + _ANSWERS_WITHIN
    for process in processes:
        process.kill(until - time.monotonic())


def _wait_gone(pid: int) -> None:
    """Wait for the end of a process that the kernel is about to kill. Reap it if it has become a child of this one.

    It has where this is the first process of a container.
    """
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(_ENDS_WITHIN * 1000)
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG)
        finally:
            os.close(fd)


class ForkServers:
    """The fork server of this process, replaced where ranks need another environment. Another one ends with its last rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._key: Any = None

    def get(self, site: WorkerSite, environment: dict[str, str]) -> ForkServer:
        """Return the fork server for these ranks; start it if there is none."""
        seen = {name: value for name, value in environment.items() if not name.startswith(_OWN)}
        key = (site.path, site.preload, seen)
        with self._lock:
            if self._server is None or not self._server.alive or self._key != key:
                if self._server is not None:
                    self._server.leave()
                self._server, self._key = ForkServer(site, environment), key
            return self._server


FORK_SERVERS = ForkServers()


def process_state(pid: int) -> str:
    """Return what the kernel says a process does, such as "sleeping" or "stopped"; "gone" if there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "gone"
    return next((line.partition("(")[2].rstrip(")") for line in lines if line.startswith("State:")), "unknown")


class OtherMachine(Protocol):
    """A machine that starts ranks, as a `ForkServer` does here."""

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
