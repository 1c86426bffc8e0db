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
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.collectives import CommStats, wait_for
from ..engine.measuring import device_name, measure
from ..engine.mesh import BatchMesh
from ..errors import PoolError, ProtocolError
from .board import Board, resident_bytes, start_heartbeat
from .cancel import CancelPoints
from .channel import Channel, Closed, SharedBlock
from .faults import armed_fault, inject
from .limits import name_limit
from .peers import probe
from .protocol import GO_ON, SHUTDOWN, TensorPacker, decode_header, encode_header, flatten
from .tensor_cache import TensorCache

log = logging.getLogger("context_parallel.worker")

INLINE = 16 << 10  # header bytes that travel in the first broadcast
IDLE = timedelta(days=365)  # an idle rank waits for the next command for as long as ComfyUI runs


class Cancelled(Exception):
    """The user cancelled: all ranks leave the call at the same module."""


Handler = Callable[[dict[str, Any], Tensor], dict[str, Any]]
"""(header, payload) of a command -> what this rank reports."""


class Service(Protocol):
    """What ranks do for the owner of the pool. The module that `WorkerSite` names has a `make_service(worker, arguments)`."""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By command."""


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
        self._handlers: dict[str, Handler] = {"echo": self._echo}

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
        inject(self.rank, "start")
        self._end_step()
        began = time.perf_counter()
        backend, timeout = self._connect()
        mesh = BatchMesh(dist.group.WORLD, timeout, self.stats)
        if backend == "nccl":
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
        hello: dict[str, Any] = {"device": str(self.device), "name": name, "backend": backend, "seconds": seconds}
        if self.rank == 0:
            hello |= {"shares": self.mesh.shares, "measured": asdict(self.measured)}
        self.channel.send({"seq": 0, "ok": True, **hello})

    def _end_step(self) -> None:
        """Report on a step of the start, and wait until all ranks have."""
        self.channel.send({"seq": 0, "ok": True})
        while self.channel.receive().get("command") != GO_ON:
            pass  # a Cancel, after which this process ends

    def _connect(self) -> tuple[str, timedelta]:
        """Join the process groups; return the backend, and the time that a collective may take."""
        backend = self.spec["backend"]
        if backend == "auto":
            backend = dist.get_default_backend_for_device(self.device)
        store = dist.FileStore(f"/proc/self/fd/{self.spec['store_fd']}", self.world_size)  # a file without a name
        timeout = timedelta(seconds=self.spec["collective_timeout"])
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
            device_id=self.device if backend == "nccl" else None,  # connect now, and not inside the first call
        )
        self.control = dist.new_group(backend="gloo", timeout=IDLE)
        return backend, timeout

    def serve(self) -> None:
        """Run commands until told to stop."""
        while True:
            header, block = self._next()
            command, seq = header["command"], header["seq"]
            if command == SHUTDOWN:
                return
            self.board.begin(self.rank, seq)
            try:
                reply = {"ok": True, **self._handlers[command](header, block)}
            except Cancelled:
                reply = {"ok": True, "cancelled": True}
            except Exception as error:  # noqa: BLE001  (the controller raises it in the node)
                reply = {"ok": False, "at": time.monotonic(), **self._position(), **describe(error), **left_memory(self.device)}
            finally:
                self.cancel_points.end()
            self.board.begin(self.rank, 0)
            self.channel.send({"seq": seq, **reply})

    def _next(self) -> tuple[dict[str, Any], Tensor]:
        """Receive a command: rank 0 from the controller, the others from rank 0. Its tensors lie in memory that all of them map."""
        head = torch.zeros(16 + INLINE, dtype=torch.uint8)
        data, nbytes = b"", 0
        if self.rank == 0:
            header = self.channel.receive()
            while header.get("command") == "cancel":  # came after its call had ended
                header = self.channel.receive()
            if header.get("command") not in (*self._handlers, SHUTDOWN):
                raise ProtocolError(f"unknown command {header.get('command')!r}")
            data, nbytes = encode_header(header), int(header.get("nbytes", 0))
            head[:16].view(torch.int64)[:] = torch.tensor([len(data), nbytes])
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
        return decode_header(data), self.request.view(nbytes)

    def keep(self, block: Tensor) -> Tensor:
        """The bytes of a message in memory that all ranks map, which lives as long as a tensor on it. All ranks call it alike.

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

    def _position(self) -> dict[str, int]:
        """Where this rank stands in the sequences that all ranks must go through alike."""
        return {"collectives": self.stats.collectives, "pending": self.stats.pending}

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0, group=self.control)

    def result(self, value: Any) -> dict[str, Any]:
        """Rank 0 hands a value to the controller through shared memory."""
        if self.rank != 0:
            return {}
        packer = TensorPacker()
        tree = flatten(value, packer.add)
        packer.write(self.response.view(packer.nbytes))
        return {"value": tree, "nbytes": packer.nbytes}

    def begin_figures(self) -> None:
        """Begin to count what `figures` reports: what this rank sends, and the most memory that it takes of its device."""
        self.stats.reset()
        if self.device.type != "cpu":
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)

    def figures(self, began: float) -> dict[str, Any]:
        """What a call took on this rank since `begin_figures`, for its report.

        Args:
            began: when the call did, on the clock of `time.perf_counter`.
        """
        # Communication is timed by the device. A clock read before the device is done would give the call less time than that.
        wait_for(self.device)
        seconds, stats = time.perf_counter() - began, self.stats
        return {
            "seconds": seconds,
            "modules": self.board.read(self.rank).modules,
            "communication": {"seconds": stats.seconds, "collectives": stats.collectives, "bytes": stats.bytes_sent},
            "bytes": dict(stats.bytes),
            "memory": memory(self.device),
        }

    def _echo(self, header: dict[str, Any], block: Tensor) -> dict[str, Any]:
        return self.result(self.cache.unpack(header, block)["x"])

    def module_hook(self, cancel_every: int) -> Callable[[], None]:
        """Return what runs at every planned module: note the progress, and now and then leave together if the user cancelled."""

        fault = armed_fault(self.rank, "module")

        def on_module() -> None:
            module = self.board.enter_module(self.rank)
            if fault is not None:
                fault(module)
            if cancel_every and module % cancel_every == 0:
                self._check_cancel()

        return on_module

    def compiling(self, part: int) -> None:
        """A part of a model is compiled from now on, the how many-th one; 0 = no more. The time does not count as the command's."""
        self.board.compiling(self.rank, part)
        if part:
            inject(self.rank, "compile")

    def loading_hook(self) -> Callable[[int | None], None]:
        """Return what is told how many thousandths of a model are loaded, and None when it is."""
        fault: Callable[[int], None] | None = None
        told = 0

        def on_loaded(loaded: int | None) -> None:
            nonlocal fault, told
            if loaded == 0:
                fault, told = armed_fault(self.rank, "weights"), 0
            self.board.load(self.rank, loaded)
            told += 1
            if fault is not None and loaded is not None:
                fault(told)

        return on_loaded

    def _check_cancel(self) -> None:
        wait_for(self.device)  # a host that runs ahead leaves nothing to cancel
        if self.cancel_points.leave(self._cancel_asked):
            raise Cancelled

    def _cancel_asked(self) -> bool:
        frame = self.channel.poll()
        return frame is not None and frame.get("command") == "cancel"


def describe(error: BaseException) -> dict[str, str]:
    """Error -> what crosses to the controller."""
    trace = "".join(traceback.format_exception(error))
    return {"kind": type(error).__name__, "message": str(error), "trace": trace}


def memory(device: torch.device, details: bool = False) -> dict[str, int]:
    """Bytes of host memory (resident) and device memory (peak allocated; with details what is in use, reserved and free)."""
    used = {"host": resident_bytes(os.getpid()), "device": 0}
    if device.type != "cpu":
        module = torch.get_device_module(device)
        used["device"] = int(module.max_memory_allocated(device))
        if details:
            used["allocated"], used["reserved"] = int(module.memory_allocated(device)), int(module.memory_reserved(device))
            used["free"] = int(module.mem_get_info(device)[0])
    return used


def left_memory(device: torch.device) -> dict[str, Any]:
    """What a report on a failure says about memory.

    A CUDA device fails at every later call, too, once a kernel has failed: the report must go out all the same, and says that this
    process is of no more use.
    """
    try:
        return {"memory": memory(device, details=True)}
    except Exception as error:  # noqa: BLE001  (torch has several kinds of it)
        log.warning("%s does not answer any more: %s", device, error)
        return {"device_lost": True}


def run(spec: dict[str, Any]) -> None:
    """Entry point of a worker process."""
    # ComfyUI says the same on every rank while it is imported and loads; what it says at WARNING differs.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s|%(message)s", force=True)
    logging.getLogger("context_parallel").setLevel(spec["log_level"])
    torch.set_grad_enabled(False)
    worker = Worker(spec)
    try:
        worker.start()
    except Exception as error:
        failure = describe(error)
        failure["message"] += name_limit(error)
        worker.channel.send({"seq": 0, "ok": False, "at": time.monotonic(), **failure})
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
