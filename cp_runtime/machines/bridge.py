"""Carries what goes between a pool here and its ranks on one other machine.

Commands are sent over the network once per machine, with their tensors.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ContextParallelError, PoolError, RankError
from ..pool.blocks import Shared, SharedBlock
from ..pool.frames import Frame
from ..pool.launcher import LogPump
from ..pool.messages import Failure, Load, pack, unpack
from ..pool.processes import Hear, RankProcess
from .store import StoreFile

if TYPE_CHECKING:
    from .host import Machine

log = logging.getLogger("context_parallel")

_WATCHING = 0.005  # seconds between two looks at the file that ranks meet in


class MachineLost(PoolError):
    """A machine has ended, or does not answer."""


class RemoteProcess(RankProcess):
    """A rank's process on another machine. `pid` is the one that it has there."""

    def __init__(self, bridge: Bridge, rank: int, log: LogPump, hear: Hear) -> None:
        super().__init__(log)
        self._bridge, self._rank, self.hear, self.kernel = bridge, rank, hear, "running"

    @property
    def state(self) -> str:
        return self.kernel if self.returncode is None else "gone"

    def send(self, frame: Frame) -> None:
        if frame.urgent:
            self._bridge.tell_now(urgent=frame.header.decode(), rank=self._rank)
        else:
            self._bridge.send(frame)

    def send_signal(self, number: int) -> None:
        self._bridge.tell_now(signal=number, rank=self._rank)

    def kill(self) -> None:
        self._bridge.abandoned = True  # what is on its way to ranks of a pool that is killed
        self.send_signal(signal.SIGKILL)
        self._bridge.ended(self._rank)  # nobody waits for an answer over a slow link: what follows comes after the signal


class Bridge:
    """Carries what goes between a pool here and its ranks on one machine, until these have ended."""

    def __init__(self, machine: Machine, name: str, shared: Shared) -> None:
        self._machine, self.name = machine, name
        self.request = SharedBlock(os.dup(shared.request.fd))
        self.processes: dict[int, RemoteProcess] = {}
        self._store = StoreFile(shared.store)
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._lock, self._seq = threading.Lock(), -1
        self.closed = self.abandoned = False

    def tell(self, *parts: Any, **packet: Any) -> None:
        """Send a packet about this pool, after those before it; a machine that is gone is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self._machine.wire.send({"pool": self.name, **packet}, *parts, abandoned=lambda: self.abandoned)

    def tell_now(self, **packet: Any) -> None:
        """Send a packet about this pool before what is on its way."""
        with contextlib.suppress(OSError):
            self._machine.wire.send_now({"pool": self.name, **packet})

    def add(self, rank: int, process: RemoteProcess) -> None:
        """Carry for one more rank."""
        with self._lock:
            self.processes[rank] = process
            if len(self.processes) == 1:
                threading.Thread(target=self._run, name="context-parallel-bridge", daemon=True).start()

    def send(self, frame: Frame) -> None:
        """Send a command on. Never waits."""
        self._frames.put(frame)

    def hear(self, packet: dict[str, Any], data: bytearray, offset: float) -> None:
        """Take a packet from the machine. `offset`: seconds that its clock is behind this one's."""
        with self._lock:
            if "pid" in packet:
                self.processes[packet["rank"]].pid = int(packet["pid"])
            elif "status" in packet:
                rank, message = packet["rank"], f"on the computer {self._machine}: {packet['message']}"
                error = RankError(rank=rank, pid=self.processes[rank].pid, kind=str(packet["kind"]), message=message)
                self._ended(rank, int(packet["status"]), error)
            elif self.closed:
                return
            elif "report" in packet:
                self._report(packet["report"], bytes(data), offset)
            elif "store" in packet:
                self._store.append(data)
            elif "states" in packet:
                for rank, kernel in packet["states"]:
                    self.processes[rank].kernel = str(kernel)
            elif "stack" in packet:
                self.processes[packet["stack"]].log.stacks = list(map(str, packet["lines"]))

    def lost(self, error: MachineLost) -> None:
        """Note that the machine is gone, and its ranks with it."""
        with self._lock:
            for rank in self.processes:
                self._ended(rank, -signal.SIGKILL, error)
        self._close()

    def ended(self, rank: int) -> None:
        """Note that a rank was killed."""
        with self._lock:
            self._ended(rank, -signal.SIGKILL, None)

    def _ended(self, rank: int, status: int, error: Exception | None) -> None:
        process = self.processes[rank]
        if process.returncode is None:
            process.ended(status, error)
            process.hear(None)
        if all(process.returncode is not None for process in self.processes.values()):
            self._machine.bridges.pop(self.name, None)
            self.closed = True

    def _report(self, rank: int, data: bytes, offset: float) -> None:
        header = unpack(data)
        if isinstance(failure := header.message, Failure):
            message = f"{failure.message} (on the computer {self._machine})"
            data = pack(replace(failure, at=failure.at + offset, message=message), header.seq, header.nbytes)
        self.processes[rank].hear(Frame(data))

    def _run(self) -> None:
        """Send on what the pool sends, and what ranks here write where they meet."""
        try:
            while not self.closed:
                with contextlib.suppress(queue.Empty):
                    self._forward(self._frames.get(timeout=_WATCHING))
                with self._lock:
                    news = b"" if self.closed else self._store.news()
                if news:
                    self.tell(news, store=True)
        except (OSError, ValueError):  # the pool has closed its memory
            pass
        except ContextParallelError as error:
            log.error("%s: %s", self._machine.name, error)
        finally:
            self._close()
            self.tell_now(end=True)

    def _forward(self, frame: Frame) -> None:
        header = unpack(frame.header)
        if header.seq == self._seq:  # every rank of this machine gets it: once is enough
            return
        self._seq = header.seq
        if header.kind != Load.__name__:
            tensors = self.request.view(header.nbytes).numpy().data if header.nbytes else b""
            self.tell(frame.header, tensors, frame=len(frame.header))
            return
        recipe, fd = header.fields["recipe"], header.fields["memory"][1]
        # Before the file is read: the pool may give the load up meanwhile, and close its memory.
        patches = mmap.mmap(fd, 0, prot=mmap.PROT_READ) if fd and os.fstat(fd).st_size else b""
        try:
            files = self._machine.owner.describe(recipe)
        except Exception as error:  # noqa: BLE001  (the prompt fails with it)
            for process in self.processes.values():
                process.hear(Frame(pack(failure(error), header.seq)))
            return
        self.tell(frame.header, patches, frame=len(frame.header), files=files)

    def _close(self) -> None:
        with self._lock:
            self.closed = True
            self.request.close()
            self._store.close()


def failure(error: Exception) -> Failure:
    """Return what a rank would report of an error before it was asked."""
    return Failure(at=time.monotonic(), kind=type(error).__name__, message=str(error), trace="")
