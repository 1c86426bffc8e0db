"""A worker rank: waits for a command, runs it together with the other ranks, reports the outcome to the controller.

Every rank gets commands over its own pipe and reports over another, once per command: a rank whose peers hang in a collective can
still say why. What the commands do is the business of a service: the pool's owner names a module with a
`make_service(worker)`, which returns handlers by kind of request. The pool itself knows those of the start, `echo` and
`shutdown`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import mmap
import os
import queue
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.exchange.exchange import trim as trim_exchanges
from ..engine.measuring import device_name, measure
from ..engine.ranks.collectives import CommStats, wait_for
from ..engine.ranks.mesh import BatchMesh
from ..errors import ProtocolError
from ..system import system
from ..system.processes import host_bytes
from .blocks import LOOPBACK, Relay, SharedBlock
from .cancel import CancelPoints
from .frames import Buffer, Frame, Inbox
from .launcher import name_limit
from .messages import (
    KINDS,
    Arrived,
    Block,
    CallOutcome,
    CallReport,
    Cancel,
    Cancelled,
    Communication,
    Compare,
    Compared,
    Connect,
    Connected,
    Done,
    Echo,
    Failure,
    Header,
    Import,
    Imported,
    Leave,
    Measure,
    Memory,
    Message,
    Probe,
    Ready,
    Report,
    Request,
    Shutdown,
    Value,
    pack,
    unpack,
)  # fmt: skip
from .peers import MIN_SPEEDUP, compare, probe
from .processors import bind_near
from .progress import Notes, Watch
from .protocol import TensorPacker, flatten
from .tensor_cache import TensorCache

log = logging.getLogger("context_parallel.worker")

IDLE = 1.0  # seconds without a message: the next call may take some milliseconds longer


class CallCancelledOnRank(Exception):
    """The user cancelled: all ranks leave the call at the same module."""


Handler = Callable[[Any, Tensor], Report | None]
"""(request, bytes of its tensors) -> the report of this rank; None = Done."""


class Worker:
    """State of one rank, and its interface to the service.

    Args:
        spec: what the controller passed to this process; see `WorkerPool`.
        inbox: its commands.

    Attributes:
        mesh: all ranks.
        measured: the speeds of all ranks and of their links, the same on every rank.
        stats: what this rank sends.
        cache: tensors that stay here between two commands.
    """

    def __init__(self, spec: dict[str, Any], inbox: Inbox) -> None:
        self.rank, self.world_size = int(spec["rank"]), int(spec["world_size"])
        self.device = torch.device(spec["device"])
        self.inbox, self._watch = inbox, Watch()
        self._blocks = _open_blocks(spec)
        self._relay: Relay | None = None
        self._is_relay = False  # it passes bytes on to the other ranks of its computer
        self._result: Tensor | None = None  # for the controller, if no memory is shared
        self.cancel_points, self.stats = CancelPoints(), CommStats()
        self._runs = False  # cancel points are runs of the forward, not modules
        self.notes = Notes(self._send, lambda: self.stats.collectives, self._watch, spec["load_timeout"])
        # In the thread that reads: a Cancel right behind a call must not meet the cancel points of the call before.
        inbox.urgent, inbox.arrived = self._urgent, lambda frame: self.cancel_points.restart()
        self.spec, self.timeout = spec, timedelta(seconds=spec["collective_timeout"])
        self.cache = TensorCache(self.device)
        self._handlers: dict[type[Request[Any]], Handler] = {
            Import: self._import,
            Connect: self._connect,
            Probe: self._probe,
            Compare: self._compare,
            Measure: self._measure,
            Echo: lambda request, block: self.result(self.cache.unpack(request, block)["x"]),
        }

    def _import(self, *_: Any) -> Imported:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_device(self.device)
            machines = self.spec["machines"] or [""] * self.world_size
            bind_near(self.device, machines.count(machines[self.rank]))
        if self.spec["service"]:  # after the device is set: ComfyUI looks at it when it is imported
            module = importlib.import_module(f"{__package__.partition('.')[0]}.{self.spec['service']}")
            self._handlers |= module.make_service(self)
        return Imported(shares=self._blocks is not None)

    def _connect(self, request: Connect, _: Any) -> Connected:
        if request.port:
            self._store: dist.Store = dist.TCPStore(LOOPBACK, request.port, self.world_size, timeout=self.timeout)
        else:
            self._store = dist.FileStore(system.store_path(system.foreign_fd(*self.spec["store"])), self.world_size)
        self._join(self.spec["backend"])
        if self.spec.get("host"):
            self._open_relay()
        return Connected(relayed=self._relay is not None and not self._is_relay)

    def _open_relay(self) -> None:
        """Let the first rank of another computer pass the bytes of messages on to the others there."""
        machines, host = self.spec["machines"], self.spec["host"]
        first, key = machines.index(host), f"handed on by {host}"
        self._is_relay = self.rank == first and machines.count(host) > 1
        if self._is_relay:
            self._relay = Relay()
            self._store.set(key, json.dumps(self._relay.address))
        elif self.rank != first:
            try:
                self._relay = Relay(tuple(json.loads(self._store.get(key))))
            except OSError as error:
                log.warning("no memory is shared with rank %d (%s): tensors cross the network twice", first, error)

    def _join(self, backend: str) -> None:
        if not dist.is_backend_available(backend):
            raise dist.DistBackendError(f"this torch has no {backend}")
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(backend, self._store),  # a second world must not find the keys of the first
            rank=self.rank,
            world_size=self.world_size,
            timeout=self.timeout,
            device_id=None if backend == "gloo" else self.device,  # connect now, and not inside the first call
        )
        self.mesh = BatchMesh(dist.group.WORLD, self.timeout, self.stats)

    def _probe(self, *_: Any) -> None:
        probe(self.mesh.whole, self.device)

    def _compare(self, *_: Any) -> Compared:
        speed = compare(self.mesh.whole, self.device)
        if speed > MIN_SPEEDUP:
            # A new world: torch makes a gloo group inside NCCL's world by splitting it, and ranks outside of the group would hang.
            dist.destroy_process_group()
            self._join("gloo")
        return Compared(speed=speed)

    def _measure(self, *_: Any) -> Ready:
        name = device_name(self.device)
        self.measured = measure(self.mesh.sequence(), self.device, name, self.spec["machines"])
        shares = tuple(self.spec["shares"]) or self.measured.shares
        self.mesh = BatchMesh(dist.group.WORLD, self.timeout, self.stats, shares)
        batch, ring, ulysses = self.spec["degrees"]
        sequence = self.mesh.sequence(batch or 1)
        if ring and ulysses:  # they were asked for: make their groups while the devices are empty, and not inside the first call
            sequence.axes(ring, ulysses)
        return Ready(name=name, shares=self.mesh.shares)

    def serve(self) -> None:
        """Run commands until told to stop.

        Raises:
            Malformed, ProtocolError: what came is no frame or has no header, so nobody knows which command to report on. Anything
                else that is wrong with a command is reported.
        """
        while (header := unpack((frame := self._next()).header)).kind != Shutdown.__name__:
            self.notes.begin(header.seq, header.seconds)
            self._watch.until(time.monotonic() + header.seconds if header.seconds else 0.0)
            try:
                report = self._report_on(header, frame.body)
            except Exception as error:  # noqa: BLE001  (the controller raises it in the node)
                # While the error still holds its tensors: to free one of a device that is lost may end the process.
                self._answer(failure(error, self.stats, self.device), header)
            else:
                self._answer(report, header)

    def _report_on(self, header: Header, body: Buffer) -> Report:
        try:
            block, request = self._block(header, body), header.message
            return self._handlers[type(request)](request, block) or Done()  # type: ignore[index]  # `_block` has looked
        except CallCancelledOnRank:
            return Cancelled()

    def _answer(self, report: Report, header: Header) -> None:
        self.notes.begin()
        self._watch.until(0.0)
        result, self._result = self._result, None
        self._send(report, header.seq, b"" if result is None else result.numpy().data)

    def _send(self, message: Message, seq: int = 0, body: Buffer = b"") -> None:
        self.inbox.send(Frame(pack(message, seq), body))

    def _next(self) -> Frame:
        """Wait for the next command. A rank that has been idle for a while gives its free memory back."""
        with contextlib.suppress(queue.Empty):
            return self.inbox.get(IDLE)
        system.trim_heap()
        trim_exchanges()
        return self.inbox.get()

    def _urgent(self, frame: Frame) -> None:
        """Take a message out of turn, in the thread that reads."""
        header = unpack(frame.header)
        match header.message:
            case Cancel():
                self._send(Arrived(place=self.cancel_points.ask()), header.seq)
            case Leave(place=place):
                self.cancel_points.decide(place)

    def _block(self, header: Header, body: Buffer) -> Tensor:
        """Return the bytes of a command's tensors, in memory that the controller and all ranks map, or as they came. Raises
        ProtocolError: there is no such command, or less memory."""
        if KINDS[header.kind] not in self._handlers:
            raise ProtocolError(f"unknown command {header.kind!r}")
        if self._blocks is None:
            if self._relay is not None and header.nbytes and not self._is_relay:
                return self._relay.get(header.seq, header.nbytes)
            if not header.nbytes <= len(body):
                raise ProtocolError(f"a message of {header.nbytes} bytes with {len(body)} bytes")
            if self._is_relay and len(body):
                cast(Relay, self._relay).put(header.seq, body)
            return torch.frombuffer(body, dtype=torch.uint8) if len(body) else torch.empty(0, dtype=torch.uint8)
        request, _ = self._blocks
        if not 0 <= header.nbytes <= max(request.size, mmap.PAGESIZE):
            raise ProtocolError(f"a message of {header.nbytes} bytes in {request.size} bytes of shared memory")
        return request.view(header.nbytes)

    def keep(self, memory: tuple[int, int], block: Tensor) -> Tensor:
        """Return bytes that the controller left for all ranks; they live as long as a tensor on them. What a rank writes there
        stays in that rank.

        Args:
            memory: the address of a `SharedBlock`.
            block: the bytes themselves, where no memory is shared.

        Raises:
            ProtocolError: there is no such memory.
        """
        if self._blocks is None:
            return block.clone() if self._relay is not None and not self._is_relay else block  # the next message comes there
        return torch.frombuffer(self._map(memory, own=True), dtype=torch.uint8)

    def mapped(self, blocks: Sequence[Block]) -> list[mmap.mmap] | None:
        """Map blocks; None = this rank cannot."""
        if self._blocks is None:
            return None
        return [self._map(block.address, own=block.is_file or self.device.type == "cpu") for block in blocks]

    def _map(self, memory: tuple[int, int], *, own: bool) -> mmap.mmap:
        """Map memory of the controller. Raises ProtocolError: there is no such memory.

        Args:
            own: pages that this rank writes to are its own. Others are the controller's, which CUDA can register without a copy.
        """
        try:
            with open(system.foreign_fd(*memory, writable=not own), "rb") as file:
                return system.private_pages(file.fileno()) if own else mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"no memory of process {memory[0]} under number {memory[1]}: {error}") from error

    def result(self, value: Any) -> Value:
        """Hand a value of rank 0 to the controller, through shared memory or with the report."""
        if self.rank != 0:
            return Value()
        packer = TensorPacker()
        tree = flatten(value, packer.add)
        if self._blocks is None:
            block = self._result = torch.empty(packer.nbytes, dtype=torch.uint8)
        else:
            block = self._blocks[1].view(packer.nbytes)
        packer.write(block)
        return Value(value=tree, nbytes=packer.nbytes)

    def begin_figures(self) -> None:
        """Reset the counters of `report`: bytes sent, and peak memory of the device."""
        self.stats.reset()
        self._runs = False
        if self.device.type != "cpu":
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)

    def report(self, result: Value, outcome: CallOutcome, began: float) -> CallReport:
        """Return the report of a call: its result, and this rank's figures since `begin_figures`. `began`: the call's start, by
        `time.perf_counter`."""
        # Communication is timed on the device: read earlier, this clock would give the call less time than its communication.
        wait_for(self.device)
        seconds, stats = time.perf_counter() - began, self.stats
        return CallReport(
            **vars(result),
            outcome=outcome,
            seconds=seconds,
            modules=self.notes.modules,
            communication=Communication(seconds=stats.seconds, collectives=stats.collectives, bytes=stats.bytes_sent),
            bytes=dict(stats.bytes),
            memory=memory_of(self.device),
        )

    def module_hook(self, cancel_every: int) -> Callable[[], None]:
        """Return a function to run at every planned module. It notes the progress, and leaves with all ranks if the user
        cancelled. `cancel_every`: see `Call`."""

        notes = self.notes

        def on_module() -> None:
            notes.modules += 1
            if cancel_every and notes.modules % cancel_every == 0 and not self._runs:
                self.cancel_point()

        return on_module

    def run_point(self) -> bool:
        """Leave with all ranks if the user cancelled: at a run of a forward, of several that follow each other through stages.
        Modules are no cancel points in such a call. Returns whether it is sure that all ranks pass the next one."""
        self._runs = True
        self.cancel_point()
        return self.cancel_points.pledge()

    def cancel_point(self) -> None:
        """Leave with all ranks if the user cancelled."""
        wait_for(self.device)  # if the host ran ahead, nothing would be left to cancel
        if self.cancel_points.leave():
            raise CallCancelledOnRank

    def compiling(self, part: int) -> None:
        """Note that a part of a model is compiled from now on. `part`: counts from 1; 0 = no more. That time does not count towards
        the deadline."""
        self.notes.compiling(part)

    def loading_hook(self) -> Callable[[int | None], None]:
        """Return a function that takes the thousandths of a model that are loaded, or None when it is complete."""
        return self.notes.load


def _open_blocks(spec: dict[str, Any]) -> tuple[SharedBlock, SharedBlock] | None:
    """Return the memory of messages and results; None: it cannot be opened from here."""
    if spec.get("host"):  # the same numbers lead to something else there
        return None
    try:
        request, response = (SharedBlock(system.foreign_fd(*spec[name])) for name in ("request", "response"))
    except OSError as error:
        log.warning("no memory is shared with ComfyUI's process (%s): tensors go through pipes", error)
        return None
    return request, response


def failure(error: Exception, stats: CommStats, device: torch.device) -> Failure:
    """Return the report on an error that has just been raised. `stats`: the collectives of the rank."""
    memory = left_memory(device)
    return Failure(
        at=time.monotonic(),
        kind=type(error).__name__,
        message=str(error) + name_limit(error),
        trace="".join(traceback.format_exception(error)),
        collectives=stats.collectives,
        pending=stats.pending,
        memory=memory,
        device_lost=memory is None,
    )


def memory_of(device: torch.device, details: bool = False) -> Memory:
    """Return the memory of this process, in bytes. `details`: also bytes in use, reserved and free on the device."""
    host = host_bytes(os.getpid())
    if device.type == "cpu":
        return Memory(host=host, device=0)
    module = torch.get_device_module(device)
    used = Memory(host=host, device=int(module.max_memory_allocated(device)))
    if not details:
        return used
    allocated, reserved = int(module.memory_allocated(device)), int(module.memory_reserved(device))
    return replace(used, allocated=allocated, reserved=reserved, free=int(module.mem_get_info(device)[0]))


def left_memory(device: torch.device) -> Memory | None:
    """Return the memory for a report on a failure; None = the device is lost.

    A device fails at every later call, too, once a kernel has failed: the report must go out all the same, and says that this
    process is of no more use.
    """
    try:
        return memory_of(device, details=True)
    except Exception as error:  # noqa: BLE001  (torch has several kinds of it)
        log.warning("%s does not answer any more: %s", device, error)
        return None


def run(spec: dict[str, Any], inbox: Inbox) -> None:
    # ComfyUI logs the same on every rank while it is imported and loads; only its warnings differ.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s|%(message)s", force=True)
    logging.getLogger("context_parallel").setLevel(spec["log_level"])
    # Not inference mode, in which torch does not count changes in place: `CallState.once` needs them.
    torch.set_grad_enabled(False)
    Worker(spec, inbox).serve()
