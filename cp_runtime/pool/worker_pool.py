"""The controller's side of a pool: starts the ranks, sends commands to all of them, collects every rank's report.

A failed pool is never repaired: all its ranks are killed, and the next use starts a new one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..engine.ranks.sharding import Shares
from ..errors import ContextParallelError, PoolError, ProtocolError, RankError
from ..system import system
from .blocks import KEEP_BYTES, Shared
from .collection import Collection, ModuleTimes, Outcome, SendCancel, SendLeave
from .config import TIMEOUTS, RuntimeConfig, WorkerSite, split_device, timeout_of
from .failures import connect_advice, connect_failure, death, missed_deadline, reported_failure
from .frames import Buffer, Frame, Malformed
from .hosts import HostProcess, interface_to
from .launcher import OF_NCCL, as_host, child_environment, starting
from .messages import (
    Arrived,
    Beat,
    Cancel,
    Compare,
    Connect,
    Failure,
    Header,
    Import,
    Leave,
    Measure,
    Message,
    Probe,
    R,
    Report,
    Request,
    Shutdown,
    Value,
    all_of,
    pack,
    unpack,
)  # fmt: skip
from .peers import MIN_SPEEDUP, Connection, check_peers, fallback_of
from .processes import WAITING, RankProcess
from .processors import one_thread
from .progress import Progress
from .protocol import TensorPacker, read_tensor, unflatten
from .remote import INTERFACES

log = logging.getLogger("context_parallel")

IMPORTING, CONNECTING = "importing", "connecting"
# Seconds that ranks of several machines have to connect: a firewall that drops packets gives no other answer.
REMOTE_CONNECT_TIMEOUT = 9.0
PROBE_TIMEOUT = 10.0  # seconds that ranks have for the first messages over their devices' library
COMPARE_TIMEOUT = 10.0  # seconds that they have to compare it with shared memory
# A gap of this many seconds between two polls means that this process was stopped, or starved. Ranks that have reported meanwhile
# are not late: the threads that read get `DRAIN` seconds to bring their reports.
STALL, DRAIN = 0.5, 0.5
CANCEL_POLL = 0.02  # seconds between two polls for the caller's Cancel
SHUTDOWN_GRACE = 5.0


Messages = queue.SimpleQueue[tuple[int, Header | Exception | None, Buffer]]
"""Messages of ranks: the rank; a header, its error, or None at the end of the rank; the bytes behind the header."""


class CallCancelled(Exception):
    """The user cancelled while the workers computed."""


class WorkerPool:
    """Persistent worker ranks. One caller at a time, except for `abort` and `progress`.

    Attributes:
        command: the current command, or "start"; empty = none. From any thread.
        waiting_for: ranks without a report on it.
        stage: of the start: "importing" or "connecting".
        since: when the start began, in seconds since the epoch.
        last_command, last_command_ended: the last command that was not brief, and when it ended, on the clock of `time.monotonic`.
        backend: of the ranks' communication; None before they are ready.
        shares, device_names: of the ranks; empty before they are ready.
        load_timeout: seconds for a load, and for a call that brings a model to the devices.
        chosen: reason for shared memory in place of a working NCCL; empty = none.
        fallback: ways to connect; its `reason`: why the default one is not used.
        hosts: other computers with ranks.
        apart: ranks that cannot map this process's memory.
        peer_to_peer: whether their GPUs reach each other's memory; None before they connect and without NCCL.
    """

    def __init__(self, config: RuntimeConfig, site: WorkerSite) -> None:
        self.config, self.site = config, site
        self.hosts = list(filter(None, dict.fromkeys(config.machines)))
        self.world_size = config.world_size
        self.alive = False
        self.command, self.last_command = "start", ""
        self.last_command_ended = -math.inf
        self.backend: str | None = None
        self.peer_to_peer: bool | None = None
        self.chosen = ""
        self.shares: Shares = ()
        self.device_names: list[str] = []
        self.waiting_for: list[int] = []
        self.stage, self.since = IMPORTING, time.time()
        self.seconds: dict[str, float] = {}
        self._startup_timeout, self._connect_timeout, self.load_timeout = (timeout_of(name, self.world_size) for name in TIMEOUTS)
        self._seq = self._sent = 0
        self._aborted = ""
        self.fallback = fallback_of(config)
        self.processes: list[RankProcess] = []
        self._open()

    def _open(self) -> None:
        self.shared = Shared()
        self._messages: Messages = queue.SimpleQueue()
        self._progress = [(0, Progress())] * self.world_size  # the command that it is of, and the progress
        self.apart: set[int] = set()
        self._piped: set[int] = set()  # those of them that get bytes in frames, some to pass them on: see `blocks.Relay`
        self._result: Buffer = b""

    def start(self, cancelled: Callable[[], bool] | None = None) -> None:
        """Start the ranks and wait until all are ready.

        Raises:
            PoolError: the ranks did not start.
            CallCancelled: `cancelled`, which is polled meanwhile, returned True.
        """
        if self.config.shares_accelerators:
            log.warning("ranks share an accelerator: that is for checking results; one rank alone is faster")
        self.since = time.time()
        with self._running("start"):
            # One way to connect after the other, each with new processes: those of one that failed may hang in it.
            while not self.alive:
                try:
                    self._start(self.fallback.current, cancelled)
                    self.alive = True
                except BaseException as error:
                    self.kill()
                    why = ""
                    if isinstance(error, PoolError) and self.stage == CONNECTING and not self._aborted:
                        why = connect_failure(error)
                        if self.fallback.comparing:  # an optional comparison must not fail the start
                            why = why or str(error).partition("\n")[0]
                    if not (why and self.fallback.next(why)):
                        raise
                    self._open()

    def _start(self, way: Connection, cancelled: Callable[[], bool] | None) -> None:
        began, self.seconds, self.chosen, self.fallback.comparing = time.monotonic(), {}, "", False

        def step(request: Request[R], what: str = "start", timeout: float | None = None) -> list[R]:
            """Run a step on all ranks. `timeout`: of this step; None = the rest of the start's."""
            now = time.monotonic()
            since, limit = (began, self._startup_timeout) if timeout is None else (now, timeout)
            self._send(request, since + limit - now)
            reports = self._collect(what, since, limit, cancelled)
            self.seconds[request.command] = time.monotonic() - now
            return all_of(request.report, reports)

        with starting():
            self._start_processes(way)
        self.apart = {rank for rank, report in enumerate(step(Import())) if not report.shares}
        self._piped = set(self.apart)
        self.stage = CONNECTING
        self.peer_to_peer = check_peers(self.config.local, way) if way.backend == "nccl" else None
        limit = min(self._connect_timeout, REMOTE_CONNECT_TIMEOUT if self.hosts else math.inf)
        port = self.shared.store_port(self.world_size) if self.apart else 0
        # Only ways that are known to hang have a limit of their own: devices' libraries, and networks.
        connected = step(Connect(port=port), *((CONNECTING, limit) if self.hosts or way.backend == self.config.native else ()))
        self._piped -= {rank for rank, report in enumerate(connected) if report.relayed}
        if way.backend != "gloo":
            step(Probe(), CONNECTING, min(PROBE_TIMEOUT, self._connect_timeout))
        backend = way.backend
        if self.peer_to_peer is False and self.fallback.may_compare and not self.hosts:
            self.fallback.comparing = True
            speed = step(Compare(), CONNECTING, min(COMPARE_TIMEOUT, self._connect_timeout))[0].speed
            self.fallback.comparing = speed > MIN_SPEEDUP  # and while they first use it
            if self.fallback.comparing:
                backend = "gloo"
                self.chosen = f"exchanges through shared memory are {speed:.1f} × as fast as over {way}"
                log.info("%s", self.chosen)
        ready = step(Measure())
        self.fallback.comparing = False
        self.backend, self.shares, self.device_names = backend, ready[0].shares, [each.name for each in ready]
        devices = [f"{device} ({name})" for device, name in zip(self.config.devices, self.device_names, strict=True)]
        if self.shares:
            parts = zip(devices, self.shares, strict=True)
            log.info("ranks take unequal shares: %s", ", ".join(f"{device} {share}" for device, share in parts))
        steps = ", ".join(f"{step} {seconds:.1f} s" for step, seconds in self.seconds.items())
        self.seconds["start"] = time.monotonic() - began
        ranks = ", ".join(f"rank {rank} pid {self.pids[rank]} on {device}" for rank, device in enumerate(self.config.devices))
        log.info("started %d ranks in %.1f s (%s): %s", self.world_size, self.seconds["start"], steps, ranks)

    def _send(self, request: Request[Any], seconds: float, nbytes: int = 0, kept: Tensor | None = None) -> None:
        """Send a command with a time limit to all ranks. `nbytes`: of its tensors in shared memory. `kept`: see `request`."""
        seq, left = self._seq + 1, max(1e-3, seconds)
        mapped = piped = relayed = Frame(pack(request, seq, nbytes, left))
        if self.apart:
            block = self.shared.request.view(nbytes) if kept is None else kept
            relayed = Frame(pack(request, seq, block.numel(), left))
            piped = Frame(relayed.header, block.numpy().data)
        self._seq, self.waiting_for = seq, list(range(self.world_size))
        for rank, process in enumerate(self.processes):
            process.send(piped if rank in self._piped else relayed if rank in self.apart else mapped)

    def _broadcast(self, message: Message) -> None:
        """Send all ranks an urgent message about the current command."""
        frame = Frame(pack(message, self._seq), urgent=True)
        for process in self.processes:
            process.send(frame)

    def _on_frame(self, messages: Messages, rank: int, frame: Frame | Malformed | None) -> None:
        """Take a message of a rank, in the thread that reads it."""
        try:
            header = unpack(frame.header) if isinstance(frame, Frame) else None
            # Ten a second from every rank: only the last one counts, so they do not go through the queue.
            if header is not None and header.kind == Beat.__name__:
                self._progress[rank] = header.seq, Progress(cast(Beat, header.message), time.monotonic())
            else:
                body = frame.body if isinstance(frame, Frame) else b""
                messages.put((rank, ProtocolError(f"rank {rank}: {frame}") if isinstance(frame, Malformed) else header, body))
        except ProtocolError as error:
            messages.put((rank, error, b""))

    def progress(self, rank: int) -> Progress:
        """Return the progress of a rank in the current command. From any thread."""
        seq, last = self._progress[rank]
        return last if self.command and seq == self._seq else Progress(beat=last.beat)

    def abort(self, reason: str) -> None:
        """End the ranks now: the current command raises PoolError. From any thread."""
        self._aborted = reason
        self._kill_processes()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def request(
        self,
        request: Request[R],
        packer: TensorPacker | None = None,
        *,
        kept: Tensor | None = None,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[R]:
        """Run a command on all ranks and return their reports, by rank.

        Args:
            packer: tensors that the request refers to.
            kept: bytes in memory that the request names, for ranks that cannot map it.
            timeout: seconds; None = as many as loading a model may take.
            cancelled: polled while waiting.

        Raises:
            RankError: a rank failed. The pool lives on if every rank reported, and is killed otherwise.
            PoolTimeout: a rank did not report in time. The pool is killed.
            CallCancelled: `cancelled` returned True. The pool lives on if the ranks left the call in time.
            ContextParallelError: anything else. The pool lives on if nothing had been sent, and is killed otherwise.
            torch.OutOfMemoryError: of a device of this process, before anything was sent.
        """
        if not self.alive:
            raise PoolError("the worker pool is not running")
        packer, command = packer or TensorPacker(), request.command
        timeout = self.load_timeout if timeout is None else timeout
        before = self._seq
        with self._running(command, request.brief), self.named_errors(command):
            self._sent = packer.nbytes
            with one_thread():
                packer.write(self.shared.request.view(packer.nbytes))
            try:
                self._send(request, timeout, packer.nbytes, kept)
                # From here on: this process may have been stopped after the first rank was told and before the last.
                return all_of(request.report, self._collect(command, time.monotonic(), timeout, cancelled))
            except (RankError, CallCancelled):  # `_conclude` has killed the pool where necessary
                raise
            except BaseException:
                if self._seq > before:
                    self.kill()
                raise

    @contextlib.contextmanager
    def _running(self, what: str, brief: bool = False) -> Iterator[None]:
        self.waiting_for, self.command = list(range(self.world_size)), what
        try:
            yield
        finally:
            if not brief:
                self.last_command, self.last_command_ended = what, time.monotonic()
            self.command = ""

    @contextlib.contextmanager
    def named_errors(self, command: str) -> Iterator[None]:
        """Raise PoolError for whatever fails in this process, such as a device while tensors are copied: callers know one kind of
        error. ComfyUI knows torch.OutOfMemoryError, which stays as it is."""
        try:
            yield
        except (ContextParallelError, CallCancelled, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise PoolError(f"{command} failed outside of the workers: {type(error).__name__}: {error}") from error

    def trim(self, sent: int = 0) -> None:
        """Give the memory of large messages back. `sent`: bytes of the last request; that of requests stays after a large one, as
        another may come with every call, such as residuals of a ControlNet."""
        self.shared.response.trim(KEEP_BYTES)
        if sent <= KEEP_BYTES:
            self.shared.request.trim(KEEP_BYTES)

    def result(self, replies: Sequence[Value], device: torch.device) -> Any:
        """Return rank 0's value from shared memory, copied to `device`. Raises PoolError or torch.OutOfMemoryError."""
        nbytes = replies[0].nbytes
        if 0 in self.apart:
            block = torch.frombuffer(self._result, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
        else:
            block = self.shared.response.view(nbytes)
        with self.named_errors("copying the result"), one_thread():
            value = unflatten(replies[0].value, lambda leaf: read_tensor(block, leaf).to(device, copy=True))
        self.trim(self._sent)
        return value

    def close(self) -> None:
        """End the ranks: ask, wait, kill."""
        if self.alive:
            self._send(Shutdown(), SHUTDOWN_GRACE)
            self._running_after(SHUTDOWN_GRACE)
        self.kill()

    def _running_after(self, seconds: float) -> list[int]:
        """Wait for the end of all ranks, `seconds` at most; return the others."""
        deadline = time.monotonic() + seconds
        return [rank for rank, process in enumerate(self.processes) if not process.wait(max(0.0, deadline - time.monotonic()))]

    def kill(self) -> None:
        """End the ranks now and release everything."""
        self.alive = False
        self._kill_processes()
        for rank in self._running_after(SHUTDOWN_GRACE):
            pid = self.processes[rank].pid
            log.error("rank %d (pid %d, %s) did not end", rank, pid, self.processes[rank].state)
        for process in self.processes:
            process.log.finish()
        self.shared.close()

    def _kill_processes(self) -> None:
        for process in self.processes:
            process.kill()

    def _start_processes(self, way: Connection) -> None:
        """Start the ranks, here and on hosts."""
        environment, local = child_environment(self.config.device_type, len(self.config.local)), len(self.config.local)
        across = {name: interface_to(host) for host in self.hosts[:1] for name in INTERFACES}
        as_hosts = self.config.shares_accelerators and self.config.backend == "nccl"
        self.stage = IMPORTING
        here = WAITING.take(self.site, environment, local)
        self.processes[:local] = here  # an earlier start's until now: the status must find one
        for rank, machine in enumerate(self.config.machines):
            device, only = system.visibility_env(split_device(self.config.devices[rank])[1])
            spec = self._spec(rank, way) | {"device": device}
            own = environment | way.environment | across | only | (as_host(rank) if as_hosts else {})
            on_frame = partial(self._on_frame, self._messages, rank)
            if rank < local:
                here[rank].begin(spec, own, on_frame)
            else:
                first = self.config.machines.index(machine) == rank
                port = self.shared.store_port(self.world_size) if first else 0
                process = HostProcess(
                    machine, self.site, {name: own[name] for name in OF_NCCL.keys() & own} | way.environment, port
                )
                self.processes[rank : rank + 1] = [process]
                process.begin(spec | {"host": machine}, way.environment | only, on_frame)

    def _spec(self, rank: int, way: Connection) -> dict[str, Any]:
        return {
            "rank": rank,
            "world_size": self.world_size,
            "machines": self.config.machines if self.hosts else (),
            "backend": way.backend,
            "shares": self.config.shares,
            "degrees": (self.config.batch_degree, self.config.sequence.ring_degree, self.config.sequence.ulysses_degree),
            "service": self.site.service,
            "preload": self.site.preload,
            "argv": self.site.argv,
            # Longer than any step, so that the controller, which can name the late rank, times out first.
            "collective_timeout": max(self.config.step_timeout, self.load_timeout) + 60,
            "load_timeout": self.load_timeout,
            "seconds": self._startup_timeout,
            "log_level": log.getEffectiveLevel(),
            **self.shared.addresses,
        }

    def _collect(self, what: str, began: float, timeout: float, cancelled: Callable[[], bool] | None) -> list[Report]:
        """Wait for the reports of all ranks on the last command."""
        now = time.monotonic()
        collection = Collection(
            world_size=self.world_size, began=now, timeout=began + timeout - now, compile_timeout=self.load_timeout
        )
        times, woken = ModuleTimes(), -math.inf
        while True:
            before, now = now, time.monotonic()
            woken = now if now - before > STALL else woken
            messages = self._poll_messages()
            for rank, header, body in messages:
                if isinstance(header, Exception):
                    raise header
                if header is None:
                    collection.died(rank, time.monotonic())
                elif header.seq == self._seq:  # else it is late: `Arrived` for a call that ended as it was cancelled
                    message = header.message
                    if isinstance(message, Arrived):
                        collection.arrived(rank, message.place)
                    else:
                        collection.reported(rank, header.report(rank))
                        self._result = body if rank == 0 else self._result
            self.waiting_for = collection.missing
            at = {rank: self.progress(rank).at for rank in self.waiting_for}
            compiling = any(each.compiling for each in at.values())
            if any(each.has_loaded for each in at.values()):
                timeout = max(timeout, self.load_timeout)
                collection.allow(timeout)
            # A rank that compiles does not leave when told to, and modules that take long now do not the next time.
            times = ModuleTimes() if compiling else times
            times.note({rank: each.modules for rank, each in at.items()}, now)
            if self._aborted:
                collection.abort()
            step = collection.tick(now, quiet=not messages and now - woken > DRAIN, compiling=compiling)
            if isinstance(step, Outcome):
                return self._conclude(step, what, timeout)
            if isinstance(step, SendLeave):
                self._broadcast(Leave(place=step.place))
            if cancelled is not None and cancelled():
                step = collection.cancel(now, times.longest)
                if isinstance(step, SendCancel):
                    self._broadcast(Cancel())

    def _poll_messages(self) -> list[tuple[int, Header | Exception | None, Buffer]]:
        """Return the messages of ranks; wait a moment for the first."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._messages.get(timeout=CANCEL_POLL))
            while True:
                found.append(self._messages.get_nowait())
        return found

    def _conclude(self, outcome: Outcome, what: str, timeout: float) -> list[Report]:
        """Return the reports; or kill the pool where necessary, and raise what `request` promises."""
        error: Exception | None = None
        advice = connect_advice(self.config) if what == CONNECTING else ""
        if outcome.aborted:
            error = PoolError(self._aborted)
        elif outcome.cause is not None:
            rank, reply = outcome.cause, outcome.replies.get(outcome.cause)
            if isinstance(reply, Failure):
                error = reported_failure(rank, self.processes[rank].pid, reply, outcome.replies, advice)
            else:
                error = death(outcome.died, rank, self.processes, advice)
        elif outcome.cancelled:
            error = CallCancelled()
            if outcome.kill:
                log.warning("cancelled inside a step: the ranks did not leave it in time and are restarted on next use")
        elif outcome.late:
            progress = {rank: self.progress(rank) for rank in outcome.late}
            error = missed_deadline(what, timeout, progress, self.processes, advice)
        if outcome.kill:
            self.kill()
        if error is not None:
            raise error
        return [outcome.replies[rank] for rank in range(self.world_size)]
