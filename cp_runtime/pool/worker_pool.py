"""The controller's side of a pool: starts the ranks, sends commands to rank 0, collects every rank's report.

A failed pool is never repaired: all its ranks are killed, and the next use starts a new one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import PoolError, PoolTimeout, RankError
from .board import SILENT, Board, Progress
from .channel import Channel, Closed, SharedBlock
from .config import RuntimeConfig
from .launcher import LogPump, child_environment, make_directory, start_rank
from .protocol import TensorPacker, read_tensor, unflatten
from .stacks import collect_stacks, stacks_file

log = logging.getLogger("context_parallel")

STARTUP_TIMEOUT = float(os.environ.get("CP_STARTUP_TIMEOUT", "300"))
LOAD_TIMEOUT = float(os.environ.get("CP_LOAD_TIMEOUT", "1800"))
OUT_OF_MEMORY = torch.OutOfMemoryError.__name__
CANCEL_GRACE = 1.25  # how long ranks may take to leave a cancelled call before they are killed
REPORT_GRACE = 1.0  # how long the others may take to report after a first failure
TICK = 0.02
STOOD_STILL = 2.0  # seconds between two looks at the ranks that this process does not take while it runs
_SLOW = {
    "start": "If the machine is only slow, raise the environment variable CP_STARTUP_TIMEOUT.",
    "load": "If loading is only slow, raise the environment variable CP_LOAD_TIMEOUT.",
    "call": "If the step is only slow, raise step_timeout of CP Config.",
}
SHUTDOWN_GRACE = 5.0
KEEP_BYTES = 64 << 20  # of shared memory; more is given back after a message with weight patches


class CallCancelled(Exception):
    """The user cancelled while the workers computed."""


@dataclass(frozen=True, kw_only=True)
class WorkerSite:
    """What ranks run.

    Args:
        service: module of this package that makes the service of every rank (see `worker.Service`); empty = none.
        arguments: for it; plain data.
        path: folders in front of `sys.path`.
        argv: command line that the code in the ranks sees.
    """

    service: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    argv: tuple[str, ...] = ("",)


class WorkerPool:
    """Persistent worker ranks. One caller at a time, except for `abort` and `progress`.

    Args:
        config: devices, backend and timeouts.
        site: where workers find ComfyUI.

    Attributes:
        doing: the command that runs, or "start"; empty = none. From any thread.
        waiting_for: the ranks that have not reported on it.
        did, did_until: the command before, and when it ended, on the clock of `time.monotonic`.
        backend: by which the ranks communicate; None until they are ready.
    """

    def __init__(self, config: RuntimeConfig, site: WorkerSite) -> None:
        self.config, self.site = config, site
        self.world_size = config.world_size
        self.alive = False
        self.doing, self.did = "start", ""
        self.did_until = -math.inf
        self.backend: str | None = None
        self.waiting_for: list[int] = []
        self.seconds: dict[str, float] = {}
        self._seq = 0
        self._aborted = ""
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[Channel] = []
        self._log: LogPump | None = None
        self._cleanup = contextlib.ExitStack()
        with contextlib.ExitStack() as opened, starting():
            self._directory = make_directory()
            opened.callback(shutil.rmtree, self._directory, ignore_errors=True)
            self._request, self._response, self._board = (opened.enter_context(contextlib.closing(SharedBlock())) for _ in range(3))
            self._progress = Board(self._board, self.world_size)
            self._death_read, write = os.pipe()
            opened.callback(os.close, self._death_read)
            opened.callback(os.close, write)
            self._cleanup = opened.pop_all()

    def start(self, cancelled: Callable[[], bool] | None = None) -> None:
        """Start the ranks and wait until all are ready.

        Args:
            cancelled: polled while they start.

        Raises:
            PoolTimeout, RankError: the ranks did not start.
            CallCancelled: `cancelled` returned True.
        """
        began = time.monotonic()
        self._begin("start")
        try:
            with starting():
                self._spawn()
            hellos = self._collect(0, "start", began, STARTUP_TIMEOUT, cancelled)
            self.backend = hellos[0]["backend"]
            self.alive = True
        except BaseException:
            self.kill()
            raise
        finally:
            self._end()
        self.seconds = {"start": time.monotonic() - began, **hellos[0]["seconds"]}
        log.info(
            "started %d ranks in %.1f s (%s): %s",
            self.world_size,
            self.seconds["start"],
            ", ".join(f"{what} {seconds:.1f} s" for what, seconds in hellos[0]["seconds"].items()),
            ", ".join(
                f"rank {r} pid {p.pid} on {h['device']}" for r, (p, h) in enumerate(zip(self.processes, hellos, strict=True))
            ),
        )

    def progress(self, rank: int) -> Progress:
        """Where a rank is. From any thread."""
        return self._progress.read(rank)

    def abort(self, reason: str) -> None:
        """End the ranks now, so that a command which runs raises PoolError. From any thread."""
        self._aborted = reason
        self.kill_processes()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self.processes]

    def request(
        self,
        command: str,
        body: dict[str, Any],
        packer: TensorPacker | None = None,
        *,
        timeout: float,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[dict[str, Any]]:
        """Run a command on all ranks and return their reports, by rank.

        Args:
            timeout: seconds until the pool is killed.
            cancelled: polled while waiting.

        Raises:
            RankError: a rank failed. The pool lives on if every rank reported, and is killed otherwise.
            PoolTimeout: a rank did not report in time. The pool is killed.
            CallCancelled: `cancelled` returned True. The pool lives on if the ranks left the call in time.
        """
        if not self.alive:
            raise PoolError("the worker pool is not running")
        packer = packer or TensorPacker()
        self._seq += 1
        self._begin(command)
        began = time.monotonic()
        try:
            packer.write(self._request.view(packer.nbytes))
            header = {"command": command, "seq": self._seq, "nbytes": packer.nbytes, **body}
            with contextlib.suppress(Closed):  # rank 0 died: _collect says how
                self.channels[0].send(header, began + timeout)
            return self._collect(self._seq, command, began, timeout, cancelled)
        except (RankError, CallCancelled):
            raise
        except BaseException:
            self.kill()
            raise
        finally:
            self._end()

    def _begin(self, what: str) -> None:
        self.waiting_for = list(range(self.world_size))
        self.doing = what

    def _end(self) -> None:
        self.did, self.did_until = self.doing, time.monotonic()
        self.doing = ""

    def payload(self, nbytes: int) -> Tensor:
        """The bytes that the last request sent."""
        return self._request.view(nbytes)

    def trim(self) -> None:
        """Give the memory of a large message back."""
        self._request.trim(KEEP_BYTES)

    def result(self, replies: Sequence[dict[str, Any]], device: torch.device) -> Any:
        """Return the value that rank 0 left in shared memory, copied to `device`."""
        block = self._response.view(replies[0]["nbytes"])
        return unflatten(replies[0]["value"], lambda leaf: read_tensor(block, leaf).to(device, copy=True))

    def close(self) -> None:
        """End the ranks: ask, wait, kill."""
        if self.alive:
            with contextlib.suppress(Closed, PoolTimeout):
                self.channels[0].send({"command": "shutdown", "seq": self._seq + 1}, time.monotonic() + 1)
            deadline = time.monotonic() + SHUTDOWN_GRACE
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill_processes(self) -> None:
        """End the ranks now. Safe from any thread."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def kill(self) -> None:
        """End the ranks now and release everything."""
        self.alive = False
        self.kill_processes()
        for rank, process in enumerate(self.processes):
            try:
                process.wait(SHUTDOWN_GRACE)
            except subprocess.TimeoutExpired:
                log.error("rank %d (pid %d) is stuck in the kernel and did not end", rank, process.pid)
            if self._log is None and process.stdout is not None:
                process.stdout.close()
        for channel in self.channels:
            channel.close()
        self._progress.freeze()  # an error may keep this object for a while, and it may be asked for its progress
        self._cleanup.close()

    def _spawn(self) -> None:
        for rank, device in enumerate(self.config.devices):
            ours, theirs = socket.socketpair()
            self.channels.append(Channel(ours))
            fds = {
                "channel_fd": theirs.fileno(),
                "request_fd": self._request.fd,
                "response_fd": self._response.fd,
                "board_fd": self._board.fd,
                "death_fd": self._death_read,
            }
            spec = {
                **fds,
                "rank": rank,
                "world_size": self.world_size,
                "device": device,
                "backend": self.config.backend,
                "directory": str(self._directory),
                "stacks": str(stacks_file(self._directory, rank)),
                "parent": os.getpid(),
                "service": self.site.service,
                "arguments": dict(self.site.arguments),
                "path": list(self.site.path),
                "argv": list(self.site.argv),
                # Longer than any step, so that the controller, which can name the late rank, acts first.
                "collective_timeout": max(self.config.step_timeout, LOAD_TIMEOUT) + 60,
                "log_level": logging.getLevelName(log.getEffectiveLevel()),
            }
            with theirs:
                self.processes.append(
                    start_rank(spec, child_environment(self.config.device_type, self.world_size), list(fds.values()))
                )
        self._log = LogPump(self.processes)

    def _collect(
        self, seq: int, what: str, began: float, timeout: float, cancelled: Callable[[], bool] | None = None
    ) -> list[dict[str, Any]]:
        deadline, looked, stood_still = began + timeout, began, False
        replies: dict[int, dict[str, Any]] = {}
        died: dict[int, float] = {}
        cancel_sent = False
        poller = select.poll()
        ranks = {channel.fileno(): rank for rank, channel in enumerate(self.channels)}
        for fd in ranks:
            poller.register(fd, select.POLLIN)
        while len(replies) < self.world_size:
            failed = bool(died) or any(not reply["ok"] for reply in replies.values())
            now = time.monotonic()
            # A debugger or a frozen container may stop this process: time that the ranks did not have, once a command.
            if not stood_still and now - looked > STOOD_STILL:
                stood_still = True
                deadline += now - looked
            looked = now
            ready = poller.poll(min(TICK, max(0.0, deadline - now)) * 1000)
            if now >= deadline and not ready:  # what ranks reported while this process stood still counts
                if failed:
                    break
                if cancel_sent:
                    log.warning("cancelled inside a step: the ranks did not leave it in time and are restarted on next use")
                    self.kill()
                    raise CallCancelled
                late = self._late(replies, what, timeout)
                self.kill()
                raise late
            if cancelled is not None and not cancel_sent and not failed and cancelled():
                cancel_sent, deadline = True, now + CANCEL_GRACE
                with contextlib.suppress(Closed):
                    self.channels[0].send({"command": "cancel"}, deadline)
            for fd, _ in ready:
                rank = ranks[fd]
                try:
                    while (frame := self.channels[rank].poll()) is not None:
                        if frame.get("seq") == seq:
                            replies[rank] = frame
                            self.waiting_for = [other for other in self.waiting_for if other != rank]
                except Closed:
                    poller.unregister(fd)
                    died[rank] = time.monotonic()
            if not failed and (died or any(not reply["ok"] for reply in replies.values())):
                deadline = time.monotonic() + REPORT_GRACE
            if died and len(died) + len(replies) >= self.world_size:
                break
        error = self._first_failure(replies, died)
        # Ranks that failed at the same collective are still in step with each other, unless they left one under way.
        counts = {reply.get("collectives") for reply in replies.values() if not reply["ok"]}
        left = any(reply.get("pending") for reply in replies.values())
        if died or left or len(replies) < self.world_size or len(counts) > 1:
            self.kill()
        if self._aborted:
            raise PoolError(self._aborted)
        if error is not None:
            raise error
        if cancel_sent:
            raise CallCancelled
        return [replies[rank] for rank in range(self.world_size)]

    def _first_failure(self, replies: dict[int, dict[str, Any]], died: dict[int, float]) -> RankError | None:
        """The earliest failure is the cause. A death is seen a little later than the errors it causes on other ranks."""
        failures = [(reply["at"], rank) for rank, reply in replies.items() if not reply["ok"]]
        failures += [(at - 0.25, rank) for rank, at in died.items() if rank not in replies]
        if not failures:
            return None
        _, rank = min(failures)
        pid = self.processes[rank].pid
        if rank in replies:
            reply = replies[rank]
            message = reply["message"] + (describe_memory(replies) if reply["kind"] == OUT_OF_MEMORY else "")
            return RankError(rank=rank, pid=pid, kind=reply["kind"], message=message, trace=reply["trace"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(1)
        kind, message = describe_exit(self.processes[rank].returncode)
        message += " The workers are restarted on next use."
        if lines := self._log.last_lines(rank) if self._log else []:
            message += "\n\nWhat it wrote last:\n" + "\n".join(lines)
        return RankError(rank=rank, pid=pid, kind=kind, message=message)

    def _late(self, replies: dict[int, dict[str, Any]], what: str, timeout: float) -> PoolTimeout:
        """The error for ranks that did not report: it names the one that the others wait for. The pool is to be killed."""
        now = time.monotonic()
        missing = {rank: self.progress(rank) for rank in range(self.world_size) if rank not in replies}
        silent = {rank: now - at.beat for rank, at in missing.items() if at.beat and now - at.beat > SILENT}
        last = min(missing, key=lambda rank: (rank not in silent, missing[rank].modules, missing[rank].collectives))
        details = ", ".join(
            f"rank {rank} (pid {self.pids[rank]}) at module {at.modules}, collective {at.collectives}"
            + (f", without a sign of life for {silent[rank]:.0f} s" if rank in silent else "")
            for rank, at in missing.items()
        )
        text = (
            f"the workers did not finish {what} within {timeout:g} s; the one that got least far is rank {last} "
            f"(pid {self.pids[last]}). No report from {details}."
        )
        try:
            stacks = f"Stacks of all ranks: {collect_stacks(self._directory, self.processes, text)}."
        except OSError as error:
            stacks = f"No stacks of the ranks: {error}."
        return PoolTimeout(f"{text} {stacks} They are restarted on next use. {_SLOW.get(what, _SLOW['load'])}")


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Say what it is about when the system has no more descriptors, memory or processes."""
    try:
        yield
    except OSError as error:
        raise PoolError(
            f"the workers could not be started: {error}. Give ComfyUI's process more of it (`ulimit -a` shows its limits), or "
            "close what takes it, and queue the prompt again."
        ) from error


def describe_memory(replies: Mapping[int, Mapping[str, Any]]) -> str:
    """What each rank that reported says about its memory."""
    lines = []
    for rank, reply in sorted(replies.items()):
        used = [f"{name} {nbytes / 2**30:.2f} GiB" for name, nbytes in reply.get("memory", {}).items()]
        lines += [f"rank {rank}: {', '.join(used)}"] if used else []
    return "\nMemory (host: resident; device: peak):\n" + "\n".join(lines) if lines else ""


def describe_exit(code: int | None) -> tuple[str, str]:
    """Exit code of a process -> (kind, message)."""
    if code is None:
        return "ProcessGone", "the process closed its channel and did not end."
    if code < 0:
        name = signal.Signals(-code).name
        hint = " The kernel may have killed it for lack of memory." if name == "SIGKILL" else ""
        return name, f"the process was ended by signal {name}.{hint}"
    return "ProcessExit", f"the process exited with code {code}."
