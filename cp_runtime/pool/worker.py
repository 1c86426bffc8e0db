"""A worker rank: waits for a command, runs it together with the other ranks, reports the outcome to the controller.

Rank 0 gets commands over its channel and broadcasts them over a gloo control group. Every rank reports on its own channel,
once per command: a rank whose peers hang in a collective can still say why. What the commands do is the business of a `Service`,
which the pool's owner names; the pool itself knows `echo` and `shutdown`.
"""

from __future__ import annotations

import importlib
import logging
import mmap
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.collectives import CommStats, native_backend, wait_for
from ..engine.measuring import device_name, measure
from ..engine.mesh import BatchMesh
from ..errors import PoolError, ProtocolError
from .board import Board, CancelPoints, resident_bytes, start_heartbeat
from .channel import Channel, Closed, SharedBlock
from .frames import Frame, unpack
from .limits import name_limit
from .messages import (
    CallOutcome,
    CallReport,
    Cancel,
    Cancelled,
    Communication,
    Done,
    Echo,
    Failure,
    GoOn,
    Hello,
    Memory,
    Report,
    Request,
    Shutdown,
    Value,
)  # fmt: skip
from .peers import probe
from .protocol import TensorPacker, flatten
from .tensor_cache import TensorCache

log = logging.getLogger("context_parallel.worker")

INLINE = 16 << 10  # header bytes that travel in the first broadcast
IDLE = timedelta(days=365)  # an idle rank waits for the next command for as long as ComfyUI runs


class Left(Exception):
    """The user cancelled: all ranks leave the call at the same module."""


Handler = Callable[[Any, Tensor], Report | None]
"""(request, bytes of its tensors) -> what this rank reports; None = Done."""


class Service(Protocol):
    """What ranks do for the owner of the pool. The module that `WorkerSite` names has a `make_service(worker, arguments)`."""

    @property
    def handlers(self) -> Mapping[type[Request[Any]], Handler]:
        """Handlers by kind of request."""


class Worker:
    """State of one rank, and what it offers to its service.

    Args:
        spec: what the controller passed to this process; see `WorkerPool`.

    Attributes:
        mesh: all ranks.
        measured: the speeds of all ranks and of their links, the same on every rank.
        stats: what this rank sends.
        cache: tensors that stay here between two commands.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.rank, self.world_size = int(spec["rank"]), int(spec["world_size"])
        self.device = torch.device(spec["device"])
        self.channel = Channel(socket.socket(fileno=spec["channel_fd"]))
        self.request, self.response = SharedBlock(spec["request_fd"]), SharedBlock(spec["response_fd"])
        self.board = Board(SharedBlock(spec["board_fd"]), self.world_size)
        self.cancel_points = CancelPoints(self.board.decision, self.rank)
        self.stats = CommStats()
        start_heartbeat(self.board, self.rank, lambda: self.stats.collectives)
        self.spec = spec
        self.cache = TensorCache(self.device)
        self._handlers: dict[type[Request[Any]], Handler] = {
            Echo: lambda request, block: self.result(self.cache.unpack(request, block)["x"])
        }

    def start(self) -> None:
        """Import, connect, measure. All ranks take these steps together: after each the controller lets them go on."""
        seconds: dict[str, float] = {}
        began = time.perf_counter()
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_device(self.device)
        if self.spec["service"]:  # after the device is set: ComfyUI looks at it when it is imported
            module = importlib.import_module(f"{__package__.partition('.')[0]}.{self.spec['service']}")
            service: Service = module.make_service(self, self.spec["arguments"])
            self._handlers |= service.handlers
        seconds["import"] = time.perf_counter() - began
        self._end_step()
        began = time.perf_counter()
        backend, timeout = self._connect()
        mesh = BatchMesh(dist.group.WORLD, timeout, self.stats)
        if backend != "gloo":
            probe(mesh.whole, self.device)
        seconds["process groups"] = time.perf_counter() - began
        self._end_step()
        began = time.perf_counter()
        name = device_name(self.device)
        self.measured = measure(mesh.sequence(), self.device, name)
        shares = tuple(self.spec["shares"]) or self.measured.shares
        self.mesh = BatchMesh(dist.group.WORLD, timeout, self.stats, shares)
        batch, ring, ulysses = self.spec["degrees"]
        sequence = self.mesh.sequence(batch or 1)
        if ring and ulysses:  # they were asked for: make their groups while the devices are empty, and not inside the first call
            sequence.axes(ring, ulysses)
        seconds["measuring"] = time.perf_counter() - began
        first = self.rank == 0
        hello = Hello(
            device=str(self.device), name=name, backend=backend, seconds=seconds,
            measured=self.measured if first else None, shares=self.mesh.shares if first else (),
        )  # fmt: skip
        self.channel.send(hello)

    def _end_step(self) -> None:
        """Report on a step of the start, and wait until all ranks have."""
        self.channel.send(Done())
        while not isinstance(self.channel.receive().message, GoOn):
            pass  # a Cancel, after which this process ends

    def _connect(self) -> tuple[str, timedelta]:
        """Join the process groups; return the backend, and the time that a collective may take."""
        backend = self.spec["backend"]
        if backend == "auto":
            backend = native_backend(self.device.type)
        if not dist.is_backend_available(backend):
            raise dist.DistBackendError(f"this torch has no {backend}")
        store = dist.FileStore(f"/proc/self/fd/{self.spec['store_fd']}", self.world_size)  # a file without a name
        timeout = timedelta(seconds=self.spec["collective_timeout"])
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
            device_id=None if backend == "gloo" else self.device,  # connect now, and not inside the first call
        )
        self.control = dist.new_group(backend="gloo", timeout=IDLE)
        return backend, timeout

    def serve(self) -> None:
        """Run commands until told to stop."""
        while True:
            frame, block = self._next()
            if frame.kind == Shutdown.__name__:
                return
            self.board.begin(self.rank, frame.seq)
            try:
                request = frame.message
                report = self._handlers[type(request)](request, block) or Done()  # type: ignore[index]  # `_next` has looked
            except Left:
                report = Cancelled()
            except Exception as error:  # noqa: BLE001  (the controller raises it in the node)
                memory, lost = left_memory(self.device)
                report = failure(
                    error, collectives=self.stats.collectives, pending=self.stats.pending, memory=memory, device_lost=lost
                )
            finally:
                self.cancel_points.end()
            self.board.begin(self.rank, 0)
            self.channel.send(report, frame.seq)

    def _next(self) -> tuple[Frame, Tensor]:
        """Receive a command: rank 0 from the controller, the others from rank 0. Its tensors lie in memory that all of them map."""
        head = torch.zeros(16 + INLINE, dtype=torch.uint8)
        data, frame = b"", None
        if self.rank == 0:
            frame = self.channel.receive()
            while frame.kind == Cancel.__name__:  # came after its call had ended
                frame = self.channel.receive()
            if frame.kind not in {kind.__name__ for kind in (*self._handlers, Shutdown)}:
                raise ProtocolError(f"unknown command {frame.kind!r}")
            data = frame.data
            head[:16].view(torch.int64)[:] = torch.tensor([len(data), frame.nbytes])
            if len(data) <= INLINE:
                head[16 : 16 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.cancel_points.restart()
        self._broadcast(head)
        length, nbytes = head[:16].view(torch.int64).tolist()
        if length <= INLINE:
            data = head[16 : 16 + length].numpy().tobytes()
        else:
            long = torch.frombuffer(bytearray(data or length), dtype=torch.uint8)
            self._broadcast(long)
            data = long.numpy().tobytes()
        if not 0 <= nbytes <= max(self.request.size, mmap.PAGESIZE):
            raise ProtocolError(f"a message of {nbytes} bytes in {self.request.size} bytes of shared memory")
        return frame or unpack(data), self.request.view(nbytes)

    def keep(self, block: Tensor) -> Tensor:
        """Return the bytes of a message in memory that all ranks map; it lives as long as a tensor on it. All ranks call this
        together.

        What a rank writes there stays in that rank.

        Raises:
            PoolError: there is no room for it.
        """
        if not block.numel():
            return block
        shared, place = SharedBlock(), torch.tensor([os.getpid(), -1])
        try:
            if self.rank == 0:
                shared.view(block.numel()).copy_(block)
                place[1] = shared.fd
        finally:
            self._broadcast(place)  # the others wait for it
        pid, number = place.tolist()
        if number < 0:
            raise PoolError(f"rank 0 has no room for {block.nbytes / 2**20:.1f} MB that all ranks keep. Free memory.")
        with open(f"/proc/{pid}/fd/{number}", "rb") as file:
            kept = torch.frombuffer(mmap.mmap(file.fileno(), block.numel(), flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
        dist.barrier(group=self.control)  # before rank 0 closes it
        shared.close()
        return kept

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0, group=self.control)

    def result(self, value: Any) -> Value:
        """Hand a value of rank 0 to the controller through shared memory."""
        if self.rank != 0:
            return Value()
        packer = TensorPacker()
        tree = flatten(value, packer.add)
        packer.write(self.response.view(packer.nbytes))
        return Value(value=tree, nbytes=packer.nbytes)

    def begin_figures(self) -> None:
        """Begin to count what `report` tells: what this rank sends, and the most memory that it takes of its device."""
        self.stats.reset()
        if self.device.type != "cpu":
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)

    def report(self, result: Value, outcome: CallOutcome, began: float) -> CallReport:
        """Return what a call did and took on this rank since `begin_figures`. `began`: when the call began, on the clock of
        `time.perf_counter`."""
        # Communication is timed by the device. A clock read before the device is done would give the call less time than that.
        wait_for(self.device)
        seconds, stats = time.perf_counter() - began, self.stats
        return CallReport(
            **vars(result),
            outcome=outcome,
            seconds=seconds,
            modules=self.board.read(self.rank).modules,
            communication=Communication(seconds=stats.seconds, collectives=stats.collectives, bytes=stats.bytes_sent),
            bytes=dict(stats.bytes),
            memory=memory_of(self.device),
        )

    def module_hook(self, cancel_every: int) -> Callable[[], None]:
        """Return a function to run at every planned module. It notes the progress, and leaves with all ranks if the user
        cancelled."""

        def on_module() -> None:
            module = self.board.enter_module(self.rank)
            if cancel_every and module % cancel_every == 0:
                wait_for(self.device)  # if the host ran ahead, nothing would be left to cancel
                if self.cancel_points.leave(self._cancel_asked):
                    raise Left

        return on_module

    def compiling(self, part: int) -> None:
        """Note that a part of a model is compiled from now on. `part`: counts from 1; 0 = no more. The time does not count as the
        command's."""
        self.board.compiling(self.rank, part)

    def loading_hook(self) -> Callable[[int | None], None]:
        """Return a function that takes the thousandths of a model that are loaded, or None when it is complete."""
        return partial(self.board.load, self.rank)

    def _cancel_asked(self) -> bool:
        frame = self.channel.poll()
        return frame is not None and frame.kind == Cancel.__name__


def failure(error: BaseException, **more: Any) -> Failure:
    """Return the report on an error that has just been raised."""
    trace = "".join(traceback.format_exception(error))
    return Failure(at=time.monotonic(), kind=type(error).__name__, message=str(error), trace=trace, **more)


def memory_of(device: torch.device, details: bool = False) -> Memory:
    """Return the memory that this process takes, in bytes. `details`: with what is in use, reserved and free on the device."""
    host = resident_bytes(os.getpid())
    if device.type == "cpu":
        return Memory(host=host, device=0)
    module = torch.get_device_module(device)
    used = Memory(host=host, device=int(module.max_memory_allocated(device)))
    if not details:
        return used
    allocated, reserved = int(module.memory_allocated(device)), int(module.memory_reserved(device))
    return replace(used, allocated=allocated, reserved=reserved, free=int(module.mem_get_info(device)[0]))


def left_memory(device: torch.device) -> tuple[Memory | None, bool]:
    """Return the memory for a report on a failure (None = the device is lost), and whether the device is lost.

    A device fails at every later call, too, once a kernel has failed: the report must go out all the same, and says that this
    process is of no more use.
    """
    try:
        return memory_of(device, details=True), False
    except Exception as error:  # noqa: BLE001  (torch has several kinds of it)
        log.warning("%s does not answer any more: %s", device, error)
        return None, True


def run(spec: dict[str, Any]) -> None:
    """Run a worker process."""
    # ComfyUI logs the same on every rank while it is imported and loads; only its warnings differ.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s|%(message)s", force=True)
    logging.getLogger("context_parallel").setLevel(spec["log_level"])
    torch.set_grad_enabled(False)
    worker = Worker(spec)
    try:
        worker.start()
    except Exception as error:
        report = failure(error)
        worker.channel.send(replace(report, message=report.message + name_limit(error)))
        raise
    code = 0
    try:
        worker.serve()
    except Closed:
        log.debug("the controller closed the channel")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        log.exception("rank %d cannot go on", worker.rank)
        code = 1
    os._exit(code)  # groups may be poisoned: leaving without their destructors cannot hang
