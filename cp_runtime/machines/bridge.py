"""Carries what goes between a pool here and its ranks on one other machine.

Commands are read from the pool's sockets as ranks would, and sent over the network with their tensors, once per machine.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ContextParallelError, PoolError, RankError
from ..pool.board import Board
from ..pool.channel import Channel, Closed, SharedBlock, ready
from ..pool.launcher import LogPump
from ..pool.messages import Failure, Frame, Load, pack, unpack
from ..pool.processes import RankProcess
from .store import StoreFile

if TYPE_CHECKING:
    from .host import Machine

log = logging.getLogger("context_parallel")

_WATCHING, _IDLE = 0.005, 0.05  # seconds between two looks at what rank 0 decided, in a command and without one


class MachineLost(PoolError):
    """A machine has ended, or does not answer."""


class RemoteProcess(RankProcess):
    """A rank's process on another machine. `pid` is the one that it has there."""

    def __init__(self, bridge: Bridge, rank: int, log: LogPump) -> None:
        super().__init__(log)
        self._bridge, self._rank, self.kernel = bridge, rank, "running"

    @property
    def state(self) -> str:
        return self.kernel if self.returncode is None else "gone"

    def send_signal(self, number: int) -> None:
        self._bridge.tell_now(signal=number, rank=self._rank)

    def kill(self) -> None:
        self._bridge.abandoned = True  # what is on its way to ranks of a pool that is killed
        self.send_signal(signal.SIGKILL)
        self._bridge.ended(self._rank)  # nobody waits for an answer over a slow link: what follows comes after the signal

    def write_stacks(self) -> None:
        self._bridge.tell_now(stacks=self._rank)


class Bridge:
    """Carries what goes between a pool here and its ranks on one machine, until the pool closes their channels."""

    def __init__(self, machine: Machine, name: str, world_size: int, fds: Mapping[str, int]) -> None:
        self._machine, self.name = machine, name
        self.request, self._board = SharedBlock(os.dup(fds["request_fd"])), SharedBlock(os.dup(fds["board_fd"]))
        self.board = Board(self._board, world_size)
        self.processes: dict[int, RemoteProcess] = {}
        self._channels: dict[int, Channel] = {}
        self._stacks: dict[int, int] = {}
        self._store = StoreFile(fds["store_fd"])
        self._lock, self._seq = threading.Lock(), -1
        self.closed = self.abandoned = False
        self._waiting = 0  # reports that are to come

    def tell(self, *parts: Any, **packet: Any) -> None:
        """Send a packet about this pool, after those before it; a machine that is gone is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self._machine.wire.send({"pool": self.name, **packet}, *parts, abandoned=lambda: self.abandoned)

    def tell_now(self, **packet: Any) -> None:
        """Send a packet about this pool before what is on its way."""
        with contextlib.suppress(OSError):
            self._machine.wire.send_now({"pool": self.name, **packet})

    def add(self, rank: int, process: RemoteProcess, channel: socket.socket, fds: Mapping[str, int]) -> None:
        """Carry for one more rank. Its channel and the file for its stacks are duplicated."""
        with self._lock:
            self.processes[rank] = process
            self._channels[rank] = Channel(channel.dup())
            self._stacks[rank] = os.dup(fds["stacks_fd"])
            if len(self.processes) == 1:
                threading.Thread(target=self._run, name="context-parallel-bridge", daemon=True).start()

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
            elif "board" in packet:
                for rank, *words, kernel in packet["board"]:
                    self.processes[rank].kernel = str(kernel)
                    self.board.write(rank, words)
            elif "closed" in packet and (channel := self._channels.pop(packet["closed"], None)) is not None:
                channel.close()
            elif "stacks" in packet:
                os.pwrite(self._stacks[packet["stacks"]], data, 0)

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
        if self.processes[rank].returncode is None:
            self.processes[rank].ended(status, error)
        if all(process.returncode is not None for process in self.processes.values()):
            self._machine.bridges.pop(self.name, None)

    def _report(self, rank: int, data: bytes, offset: float) -> None:
        frame = unpack(data)
        self._waiting -= 1
        if frame.kind == Failure.__name__ and isinstance(failure := frame.message, Failure):
            message = f"{failure.message} (on the computer {self._machine})"
            data = pack(replace(failure, at=failure.at + offset, message=message), frame.seq, frame.nbytes)
        with contextlib.suppress(Closed, KeyError):  # the pool was killed
            self._channels[rank].send(data)

    def _run(self) -> None:
        """Send on what the pool sends, and what rank 0 decides."""
        decided = 0
        try:
            while not self.closed:
                with self._lock:
                    channels = dict(self._channels)
                if not channels:
                    break
                for rank in ready(channels, _WATCHING if self._waiting else _IDLE):
                    self._forward(rank, channels[rank])
                with self._lock:
                    news = b"" if self.closed else self._store.news()
                if news:
                    self.tell(news, store=True)
                if (decision := self.board.decided) != decided:
                    decided = decision
                    self.tell(decision=decision)
        except (Closed, OSError, ValueError):  # the pool has closed the channels; or they were, because the machine is gone
            pass
        except ContextParallelError as error:
            log.error("%s: %s", self._machine.name, error)
        finally:
            self._close()
            self.tell_now(end=True)

    def _forward(self, rank: int, channel: Channel) -> None:
        frames = []
        with self._lock:
            if self._channels.get(rank) is not channel:  # its rank has ended
                return
            channel.flush()
            while (frame := channel.poll()) is not None:
                frames.append(frame)
        for frame in frames:
            if frame.seq != self._seq:  # every rank of this machine gets it: once is enough
                self._seq, self._waiting = frame.seq, len(self._channels)
                self._send(frame)

    def _send(self, frame: Frame) -> None:
        if frame.kind != Load.__name__:
            tensors = self.request.view(frame.nbytes).numpy().data if frame.nbytes else b""
            self.tell(frame.data, tensors, frame=len(frame.data))
            return
        recipe, fd = frame.fields["recipe"], frame.fields["memory"][1]
        # Before the file is read: the pool may give the load up meanwhile, and close its memory.
        patches = mmap.mmap(fd, 0, prot=mmap.PROT_READ) if fd and os.fstat(fd).st_size else b""
        try:
            files = self._machine.owner.describe(recipe)
        except Exception as error:  # noqa: BLE001  (the prompt fails with it)
            for channel in self._channels.values():
                with contextlib.suppress(Closed):
                    channel.send(pack(failure(error), frame.seq))
            return
        self.tell(frame.data, patches, frame=len(frame.data), files=files)

    def _close(self) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
            for channel in self._channels.values():
                channel.close()
            for fd in self._stacks.values():
                os.close(fd)
            self.board.freeze()
            self.request.close()
            self._board.close()
            self._store.close()


def failure(error: Exception) -> Failure:
    """Return what a rank would report of an error before it was asked."""
    return Failure(at=time.monotonic(), kind=type(error).__name__, message=str(error), trace="")
