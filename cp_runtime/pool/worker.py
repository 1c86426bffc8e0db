"""A worker rank: waits for a command, runs it together with the other ranks, reports the outcome to the controller.

Rank 0 gets commands over its channel and broadcasts them over a gloo control group. Every rank reports on its own channel,
once per command: a rank whose peers hang in a collective can still say why.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import SequenceSettings
from ..cost import DegreePlanner, measure
from ..errors import ProtocolError
from ..mesh import BatchMesh, CommStats
from .board import Board, resident_bytes, start_heartbeat
from .cancel import CancelPoints
from .channel import Channel, Closed, SharedBlock
from .faults import armed_fault, inject
from .protocol import COMMANDS, TensorPacker, decode_header, encode_header, flatten, read_tensor, unflatten

log = logging.getLogger("context_parallel.worker")

INLINE = 16 << 10  # header bytes that travel in the first broadcast
IDLE = timedelta(days=365)  # an idle rank waits for the next command for as long as ComfyUI runs


class Cancelled(Exception):
    """The user cancelled: all ranks leave the call at the same module."""


class Worker:
    """State of one rank.

    Args:
        spec: what the controller passed to this process; see `WorkerPool`.
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
        self.cache: dict[str, Tensor] = {}
        self._handlers: dict[str, Callable[[dict[str, Any], Tensor], dict[str, Any]]] = {
            "echo": self._echo,
            "mirror": self._mirror,
            "attach": self._attach,
            "detach": self._detach,
            "call": self._call,
            "unload": self._unload,
        }

    def start(self) -> None:
        """Import, join the process groups, say hello."""
        seconds: dict[str, float] = {}
        began = time.perf_counter()
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_device(self.device)
        self.mirrors: Any = None
        if self.spec["comfyui"]:
            from .mirror import Mirrors  # imports ComfyUI, after the device is set

            self.mirrors = Mirrors(self.device, self.spec["model_folders"])
        seconds["import"] = time.perf_counter() - began
        inject(self.rank, "start")
        began = time.perf_counter()
        backend = self.spec["backend"]
        if backend == "auto":
            backend = dist.get_default_backend_for_device(self.device)
        store = dist.FileStore(str(Path(self.spec["directory"]) / "store"), self.world_size)
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
        self.mesh = BatchMesh(dist.group.WORLD, timeout, self.stats)
        seconds["process groups"] = time.perf_counter() - began
        began = time.perf_counter()
        self.rates = measure(self.mesh.sequence(), self.device)
        seconds["measuring"] = time.perf_counter() - began
        self.channel.send({"seq": 0, "ok": True, "device": str(self.device), "backend": backend, "seconds": seconds})

    def serve(self) -> None:
        """Run commands until told to stop."""
        while True:
            header, block = self._next()
            command, seq = header["command"], header["seq"]
            if command == "shutdown":
                return
            self.board.begin(self.rank, seq)
            try:
                reply = {"ok": True, **self._handlers[command](header, block)}
            except Cancelled:
                reply = {"ok": True, "cancelled": True}
            except Exception as error:  # noqa: BLE001  (the controller raises it in the node)
                used = memory(self.device, details=True)
                reply = {"ok": False, "at": time.monotonic(), **self._position(), **describe(error), "memory": used}
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
            if header.get("command") not in COMMANDS:
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

    def _position(self) -> dict[str, int]:
        """Where this rank stands in the sequences that all ranks must go through alike."""
        return {"collectives": self.stats.collectives, "pending": self.stats.pending}

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0, group=self.control)

    def _value(self, header: dict[str, Any], block: Tensor) -> Any:
        """Rebuild the value of a message on this rank's device, from its payload and from cached tensors.

        What the message says to leave there stays in the payload's memory, until this rank has replied.
        """
        if header["drop"] is None:
            self.cache.clear()
        for key in header["drop"] or ():
            del self.cache[key]

        views: dict[str, Tensor] = {}  # a tensor that comes several times stays one object

        def load(leaf: dict[str, Any]) -> Tensor:
            if "$shared" in leaf:
                return views.setdefault(str(leaf), read_tensor(block, leaf["$shared"]))
            # The payload's memory is overwritten by the next message, so host tensors are copied as well.
            if "$store" in leaf:
                key, inner = leaf["$store"]
                self.cache[key] = read_tensor(block, inner).to(self.device, copy=True)
                leaf = {"$cached": key}
            if "$cached" in leaf:
                # A copy: HunyuanDiT and SD3's context processor change the text in place.
                key = leaf["$cached"]
                if key not in views:
                    views[key] = self.cache[key].clone()
                return views[key]
            return read_tensor(block, leaf).to(self.device, copy=True)

        return unflatten(header["value"], load)

    def _result(self, value: Any) -> dict[str, Any]:
        """Rank 0 hands a value to the controller through shared memory."""
        if self.rank != 0:
            return {}
        packer = TensorPacker()
        tree = flatten(value, packer.add)
        packer.write(self.response.view(packer.nbytes))
        return {"value": tree, "nbytes": packer.nbytes}

    def _echo(self, header: dict[str, Any], block: Tensor) -> dict[str, Any]:
        return self._result(self._value(header, block)["x"])

    def _mirror(self, header: dict[str, Any], block: Tensor) -> dict[str, Any]:
        inject(self.rank, "load")
        reply: dict[str, Any] = self._require_mirrors().load(header, block)
        return reply

    def _detach(self, header: dict[str, Any], _: Tensor) -> dict[str, Any]:
        self._require_mirrors().detach(header["keys"])
        return {}

    def _attach(self, header: dict[str, Any], block: Tensor) -> dict[str, Any]:
        self._require_mirrors().attach(header, block)
        return {}

    def _unload(self, header: dict[str, Any], _: Tensor) -> dict[str, Any]:
        self.cache.clear()
        self._require_mirrors().unload(header["key"])
        return {}

    def _call(self, header: dict[str, Any], block: Tensor) -> dict[str, Any]:
        began = time.perf_counter()
        arguments = self._value(header, block)
        self.stats.reset()
        settings = SequenceSettings(**header["sequence"])
        out, done = self._require_mirrors().call(
            header,
            arguments,
            self.mesh,
            lambda ranks: DegreePlanner(settings, ranks, self.rates),
            self._enter(header["cancel_every"]),
        )
        reply = self._result(out)  # waits for the device
        stats = self.stats
        return {
            **reply,
            **done,
            "seconds": time.perf_counter() - began,
            "modules": self.board.read(self.rank).modules,
            "communication": {"seconds": stats.seconds, "collectives": stats.collectives, "bytes": stats.bytes_sent},
            "memory": memory(self.device),
        }

    def _enter(self, cancel_every: int) -> Callable[[], None]:
        """Return what runs at every planned module: note the progress, and now and then leave together if the user cancelled."""

        fault = armed_fault(self.rank, "module")

        def on_module() -> None:
            module = self.board.enter_module(self.rank)
            if fault is not None:
                fault(module)
            if cancel_every and module % cancel_every == 0:
                self._check_cancel()

        return on_module

    def _check_cancel(self) -> None:
        if self.device.type != "cpu":  # the host must not run ahead of the device, or there is nothing left to cancel
            torch.get_device_module(self.device).synchronize()
        if self.cancel_points.leave(self._cancel_asked):
            raise Cancelled

    def _cancel_asked(self) -> bool:
        frame = self.channel.poll()
        return frame is not None and frame.get("command") == "cancel"

    def _require_mirrors(self) -> Any:
        if self.mirrors is None:
            raise ProtocolError("this pool was started without ComfyUI")
        return self.mirrors


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
        worker.channel.send({"seq": 0, "ok": False, "at": time.monotonic(), **describe(error)})
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
