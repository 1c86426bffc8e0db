"""The controller's side of a pool: starts the ranks, sends commands to rank 0, collects every rank's report.

A failed pool is never repaired: all its ranks are killed, and the next use starts a new one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.measuring import Measured
from ..engine.sharding import Shares
from ..errors import ContextParallelError, PoolError, PoolTimeout, RankError
from .board import Board, Progress
from .channel import Channel, Closed, SharedBlock
from .collection import Collection, Outcome, Reply, SendCancel
from .config import RuntimeConfig
from .failures import death, first_death, missed_deadline, reported_failure, start_advice, unforked
from .forking import FORK_SERVERS, RankProcess
from .launcher import as_host, child_environment, memory_file
from .limits import starting
from .log_pump import LogPump
from .module_times import ModuleTimes
from .peers import without_peer_access
from .protocol import TensorPacker, read_tensor, unflatten
from .settings import load_timeout, startup_timeout
from .site import WorkerSite
from .stacks import StateWatch

log = logging.getLogger("context_parallel")

TICK = 0.02  # seconds between two looks at the caller's Cancel
SHUTDOWN_GRACE = 5.0
KEEP_BYTES = 64 << 20  # of shared memory; more is given back after a message with weight patches


class CallCancelled(Exception):
    """The user cancelled while the workers computed."""


class WorkerPool:
    """Persistent worker ranks. One caller at a time, except for `abort` and `progress`.

    Args:
        config: devices, backend and timeouts.
        site: where workers find ComfyUI.

    Attributes:
        doing: the command that runs, or "start"; empty = none. From any thread.
        waiting_for: the ranks that have not reported on it.
        stage: of the start: "starting processes", "importing" what they need where no process has yet, "connecting" them.
        since: when the start began, in seconds since the epoch.
        imports: whether what ranks need had to be imported for this start, which takes most of its time.
        did, did_until: the command before, and when it ended, on the clock of `time.monotonic`.
        backend: by which the ranks communicate; None until they are ready.
        measured, shares, device_names: of the ranks; none until they are ready.
        peer_to_peer: whether the driver lets their GPUs reach each other's memory; None until they are ready and without NCCL.
    """

    def __init__(self, config: RuntimeConfig, site: WorkerSite) -> None:
        self.config, self.site = config, site
        self.world_size = config.world_size
        self.alive = False
        self.doing, self.did = "start", ""
        self.did_until = -math.inf
        self.backend: str | None = None
        self.peer_to_peer: bool | None = None
        self.measured: Measured | None = None
        self.shares: Shares = ()
        self.device_names: list[str] = []
        self.waiting_for: list[int] = []
        self.stage, self.since, self.imports = "starting processes", time.time(), True
        self.seconds: dict[str, float] = {}
        self._startup_timeout, self._load_timeout = startup_timeout(), load_timeout()
        self._seq = 0
        self._aborted = ""
        self.processes: list[RankProcess] = []
        self.channels: list[Channel] = []
        self._log: LogPump | None = None
        self._cleanup = contextlib.ExitStack()
        with contextlib.ExitStack() as opened, starting():
            self._store, *self._stacks = (self._memory_file(opened) for _ in range(1 + self.world_size))
            self._request, self._response, self._board = (opened.enter_context(contextlib.closing(SharedBlock())) for _ in range(3))
            self._progress = Board(self._board, self.world_size)
            self._death_read, write = os.pipe()
            opened.callback(os.close, self._death_read)
            opened.callback(os.close, write)
            self._cleanup = opened.pop_all()

    @staticmethod
    def _memory_file(opened: contextlib.ExitStack) -> int:
        fd = memory_file()
        opened.callback(os.close, fd)
        return fd

    def start(self, cancelled: Callable[[], bool] | None = None) -> None:
        """Start the ranks and wait until all are ready.

        Args:
            cancelled: polled while they start.

        Raises:
            PoolError: the ranks did not start.
            CallCancelled: `cancelled` returned True.
        """
        if self.config.shares_accelerators:
            log.warning("ranks share an accelerator: that is for checking results; one rank alone is faster")
        began = time.monotonic()
        self.since = time.time()
        self._begin("start")
        try:
            with starting():
                self._spawn(began + self._startup_timeout, cancelled)
            self.stage = "connecting"
            hellos = self._collect(0, "start", began, self._startup_timeout, cancelled)
            self.backend = hellos[0]["backend"]
            self.measured = Measured.from_json(hellos[0]["measured"])
            self.shares = tuple(hellos[0]["shares"])
            self.device_names = [hello["name"] for hello in hellos]
            if self.shares:
                parts = zip(self.config.devices, self.device_names, self.shares, strict=True)
                log.info("ranks take unequal shares: %s", ", ".join(f"{device} ({name}) {share}" for device, name, share in parts))
            if self.backend == "nccl":
                self._look_at_peers()
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

    def _look_at_peers(self) -> None:
        pairs = without_peer_access(self.config.devices)
        self.peer_to_peer = not pairs
        if pairs:
            log.warning("no peer-to-peer transfers from %s: what ranks send goes through host memory, slowly", ", ".join(pairs))

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
    ) -> list[Reply]:
        """Run a command on all ranks and return their reports, by rank.

        Args:
            timeout: seconds until the pool is killed.
            cancelled: polled while waiting.

        Raises:
            RankError: a rank failed. The pool lives on if every rank reported, and is killed otherwise.
            PoolTimeout: a rank did not report in time. The pool is killed.
            CallCancelled: `cancelled` returned True. The pool lives on if the ranks left the call in time.
            ContextParallelError: anything else. The pool is killed.
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
        except ContextParallelError:
            self.kill()
            raise
        except Exception as error:  # such as a device that fails while tensors are copied: callers know one kind of error
            self.kill()
            raise PoolError(f"{command} failed outside of the workers: {type(error).__name__}: {error}") from error
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

    def result(self, replies: Sequence[Reply], device: torch.device) -> Any:
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
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill_processes(self) -> None:
        """End the ranks now. Safe from any thread."""
        for process in self.processes:
            process.kill()

    def kill(self) -> None:
        """End the ranks now and release everything."""
        self.alive = False
        self.kill_processes()
        for rank, process in enumerate(self.processes):
            if not process.wait(SHUTDOWN_GRACE):
                log.error("rank %d (pid %d) is stuck in the kernel and did not end", rank, process.pid)
        if self._log is not None:
            self._log.finish()
        for channel in self.channels:
            channel.close()
        self._progress.freeze()  # an error may keep this object for a while, and it may be asked for its progress
        self._cleanup.close()

    def _spawn(self, deadline: float, cancelled: Callable[[], bool] | None) -> None:
        """Have the ranks forked."""
        environment = child_environment(self.config.device_type, self.world_size)
        hosts = self.config.shares_accelerators and self.config.backend == "nccl"
        server = FORK_SERVERS.get(self.site, environment)
        self.imports = not server.ready
        self.stage = "importing" if self.imports else "starting processes"
        with contextlib.ExitStack() as outputs:
            read = []
            for rank, device in enumerate(self.config.devices):
                ours, theirs = socket.socketpair()
                self.channels.append(Channel(ours))
                with theirs:
                    output, written = os.pipe()
                    outputs.callback(os.close, output)
                    read.append(output)
                    own = environment | as_host(rank) if hosts else environment
                    try:
                        self.processes.append(server.start(self._spec(rank, device), own, self._shared(rank, theirs), written))
                    finally:
                        os.close(written)
            self._log = LogPump(read)
            outputs.pop_all()  # the pump closes them
        for rank, process in enumerate(self.processes):
            while not process.wait_started(TICK):
                if self._aborted:
                    raise PoolError(self._aborted)
                if cancelled is not None and cancelled():
                    raise CallCancelled
                if time.monotonic() > deadline:
                    raise unforked(rank, server.pid, self._startup_timeout)

    def _shared(self, rank: int, channel: socket.socket) -> dict[str, int]:
        """Descriptors that a rank inherits."""
        return {
            "channel_fd": channel.fileno(),
            "request_fd": self._request.fd,
            "response_fd": self._response.fd,
            "board_fd": self._board.fd,
            "death_fd": self._death_read,
            "store_fd": self._store,
            "stacks_fd": self._stacks[rank],
        }

    def _spec(self, rank: int, device: str) -> dict[str, Any]:
        return {
            "rank": rank,
            "world_size": self.world_size,
            "device": device,
            "backend": self.config.backend,
            "shares": self.config.shares,
            "service": self.site.service,
            "arguments": self.site.arguments,
            "argv": self.site.argv,
            # Longer than any step, so that the controller, which can name the late rank, acts first.
            "collective_timeout": max(self.config.step_timeout, self._load_timeout) + 60,
            "log_level": logging.getLevelName(log.getEffectiveLevel()),
        }

    def _collect(
        self, seq: int, what: str, began: float, timeout: float, cancelled: Callable[[], bool] | None = None
    ) -> list[Reply]:
        """Wait for the reports of all ranks on a command."""
        collection = Collection(world_size=self.world_size, began=began, timeout=timeout, compile_timeout=self._load_timeout)
        states, times = StateWatch(self.processes, began), ModuleTimes()
        ranks = {channel.fileno(): rank for rank, channel in enumerate(self.channels)}
        poller = select.poll()
        for fd in ranks:
            poller.register(fd, select.POLLIN)
        until = began + timeout
        while True:
            now = time.monotonic()
            ready = poller.poll(min(TICK, max(0.0, until - now)) * 1000)
            for fd, _ in ready:
                rank = ranks[fd]
                try:
                    while (frame := self.channels[rank].poll()) is not None:
                        if frame.get("seq") == seq:
                            collection.reported(rank, frame)
                except Closed:
                    poller.unregister(fd)
                    collection.died(rank, time.monotonic())
            self.waiting_for = collection.missing
            at = {rank: self.progress(rank) for rank in self.waiting_for}
            compiling = any(progress.compiling for progress in at.values())
            # Who compiles does not leave when told to, and what takes long now does not the next time.
            times = ModuleTimes() if compiling else times
            times.note({rank: progress.modules for rank, progress in at.items()}, now)
            if self._aborted:
                collection.abort()
            step = collection.tick(now, quiet=not ready, stopped=states.stopped(self.waiting_for, now), compiling=compiling)
            if isinstance(step, Outcome):
                return self._conclude(step, what, timeout)
            if cancelled is not None and cancelled():
                step = collection.cancel(now, times.longest)
            if isinstance(step, SendCancel):
                with contextlib.suppress(Closed):
                    self.channels[0].send({"command": "cancel"}, step.until)
            until = step.until

    def _conclude(self, outcome: Outcome, what: str, timeout: float) -> list[Reply]:
        """Return the reports, or kill the pool where it has to be and raise what `request` promises."""
        error: Exception | None = None
        advice = start_advice(self.config) if what == "start" else ""
        if outcome.aborted:
            error = PoolError(self._aborted)
        elif outcome.cause is not None:
            rank, reply = outcome.cause, outcome.replies.get(outcome.cause)
            if reply is not None and not reply["ok"]:
                error = reported_failure(rank, self.processes[rank].pid, outcome.replies, advice)
            else:
                rank = first_death(outcome.died, rank, self.processes)
                error = death(rank, self.processes[rank], self._log, advice)
        elif outcome.cancelled:
            error = CallCancelled()
            if outcome.kill:
                log.warning("cancelled inside a step: the ranks did not leave it in time and are restarted on next use")
        elif outcome.late:
            progress = {rank: self.progress(rank) for rank in outcome.late}
            error = missed_deadline(what, timeout, progress, outcome.stopped, self.processes, self._stacks, advice)
        if outcome.kill:
            self.kill()
        if error is not None:
            raise error
        return [outcome.replies[rank] for rank in range(self.world_size)]
