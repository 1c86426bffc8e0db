"""Starts ranks on a machine that has joined, for the ComfyUI on another one, and passes on what goes between them.

To its ranks the relay is what ComfyUI's process is to the ranks there: it has started them, their commands come over a socket that
they inherit, and tensors lie in memory that all of them map. So a tensor comes to a machine once, however many ranks it has.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from ..errors import ContextParallelError
from ..pool.board import Inherited
from ..pool.channel import Channel, Closed, SharedBlock, ready
from ..pool.config import WorkerSite
from ..pool.failures import death
from ..pool.launcher import child_environment, content_of, name_limit
from ..pool.messages import Frame, Load, pack, unpack
from ..pool.processes import WAITING, RankProcess
from ..pool.rank_program import PACKAGE, import_by_name
from .bridge import failure
from .meeting import meet
from .store import StoreFile
from .wire import BEAT, Code, Wire, interfaces

log = logging.getLogger("context_parallel")

_RECIPES = f"{PACKAGE}.comfy.shared.recipe"  # finds the file of a load here, whatever ComfyUI's side sends
_STACKS = 0.4  # seconds that a rank gets to write its stacks


@dataclass(frozen=True)
class Place:
    """What a machine that joins has: its name, torch's type of its devices, their names, and its model folders by kind. `site`: its
    ComfyUI."""

    name: str
    device_type: str
    devices: list[str]
    folders: dict[str, list[str]]
    site: WorkerSite


@dataclass
class Ranks:
    """The ranks of one pool on this machine."""

    inherited: Inherited
    processes: dict[int, RankProcess] = field(default_factory=dict)
    channels: dict[int, Channel] = field(default_factory=dict)
    store: StoreFile = field(init=False)
    told: set[int] = field(default_factory=set)  # ranks whose start, or whose end, ComfyUI knows of

    def __post_init__(self) -> None:
        self.store = StoreFile(self.inherited.store)


class Relay:
    """Serves ComfyUI over a connection. One thread takes what it sends, another what ranks report."""

    def __init__(self, wire: Wire, place: Place, token: str) -> None:
        self._wire, self._place, self._token, self._pool = wire, place, token, ""
        self._ranks = Ranks(Inherited(1))
        self._lock, self._over = threading.Lock(), False

    def serve(self) -> str:
        """Serve until the connection ends, and the ranks with it; return why it ended."""
        forwarded = _Forwarded(self._wire)
        log.addHandler(forwarded)
        threading.Thread(target=self._watch, name="context-parallel-ranks", daemon=True).start()
        try:
            while True:
                packet, data = self._wire.receive()
                with self._lock:
                    self._take(packet, data)
        except Exception as error:  # noqa: BLE001  (whatever ComfyUI sends, this computer tries again)
            return f"{type(error).__name__}: {error}"
        finally:
            log.removeHandler(forwarded)
            self._over = True
            self._wire.close()
            with self._lock:
                self._end()

    def _take(self, packet: dict[str, Any], data: bytearray) -> None:
        if "start" in packet:
            self._start(packet)
        elif "meet" in packet:
            threading.Thread(target=self._meet, args=packet["meet"], daemon=True).start()
        elif packet.get("pool") != self._pool:
            return  # a sign of life; or for ranks that have ended
        elif "frame" in packet:
            frame, tensors = _unpack(packet, data)
            if frame.kind == Load.__name__:  # what takes a while must not keep a kill waiting
                threading.Thread(target=self._load, args=(self._ranks, frame, tensors, packet["files"]), daemon=True).start()
                return
            if tensors:
                self._ranks.inherited.request.view(len(tensors)).copy_(torch.frombuffer(tensors, dtype=torch.uint8))
            self._pass_on(frame)
        elif "store" in packet:
            self._ranks.store.append(data)
        elif "decision" in packet:
            self._ranks.inherited.board.decide(packet["decision"])
        elif "signal" in packet and (process := self._ranks.processes.get(packet["rank"])) is not None:
            process.send_signal(packet["signal"])
        elif "stacks" in packet and (process := self._ranks.processes.get(packet["stacks"])) is not None:
            threading.Thread(target=self._write_stacks, args=(self._ranks, packet["stacks"])).start()
        elif "end" in packet:
            for process in self._ranks.processes.values():
                process.kill()

    def _meet(self, address: str, port: int) -> None:
        failed = meet(self._wire.own, Code(address, port, self._token))
        with contextlib.suppress(OSError):
            self._wire.send({"met": failed})

    def _start(self, packet: dict[str, Any]) -> None:
        """Start a rank. The first one of another pool ends those of the one before."""
        spec, place = packet["start"], self._place
        rank, world = spec["rank"], spec["world_size"]
        if packet["pool"] != self._pool:
            self._end()
            self._pool, self._ranks = packet["pool"], Ranks(Inherited(world))
        ranks = self._ranks
        # ComfyUI's options decide how it computes.
        site = replace(place.site, service=spec["service"], preload=tuple(spec["preload"]), argv=tuple(spec["argv"]))
        environment = child_environment(place.device_type, spec["machines"].count(place.name))
        try:
            (process,) = WAITING.take(site, environment, 1)
        except (OSError, RuntimeError) as error:
            message = f"it could not be started: {error}.{name_limit(error)}"
            self._wire.send({"pool": self._pool, "rank": rank, "status": 1, "kind": type(error).__name__, "message": message})
            return
        ours, theirs = socket.socketpair()
        with theirs:
            ranks.channels[rank] = Channel(ours)
            ranks.processes[rank] = process
            process.begin(spec, environment | interfaces(self._wire.own), theirs, ranks.inherited.descriptors(rank))

    def _pass_on(self, frame: Frame) -> None:
        self._ranks.inherited.board.undecided()
        for channel in self._ranks.channels.values():
            with contextlib.suppress(Closed):
                channel.send(frame.data)

    def _load(self, ranks: Ranks, frame: Frame, tensors: memoryview, file: dict[str, Any]) -> None:
        """Pass a load on, whose file is the one on this machine."""
        try:
            frame = self._relocated(frame, tensors, file)
        except Exception as error:  # noqa: BLE001  (the prompt fails with it)
            report = pack(failure(error), frame.seq)
            with self._lock, contextlib.suppress(OSError):
                for rank in ranks.channels:
                    self._report(rank, report)
            return
        with self._lock:
            if self._ranks is ranks:
                self._pass_on(frame)

    def _relocated(self, frame: Frame, tensors: memoryview, file: dict[str, Any]) -> Frame:
        """Return a load whose file is the one on this machine, and whose patches lie in this process's memory. `file`: as
        `comfy.shared.recipe.describe` says what it is."""
        message = cast(Load, frame.message)
        recipe = import_by_name(_RECIPES).relocate(message.recipe, file, self._place.folders, self._place.name)
        self._kept = SharedBlock()  # until the next load: ranks map it while they load
        if tensors:
            self._kept.view(len(tensors)).copy_(torch.frombuffer(tensors, dtype=torch.uint8))
        else:
            self._kept.view(0)
        moved = replace(message, recipe=recipe, memory=self._kept.address)
        return unpack(pack(moved, frame.seq, frame.nbytes))

    def _watch(self) -> None:
        """Tell ComfyUI what ranks report, how far they are, and that they have ended. The connection ends with this."""
        due = 0.0
        try:
            while not self._over:
                with self._lock:
                    channels = dict(self._ranks.channels)
                heard = ready(channels, 0.02 if channels else 0.1)
                with self._lock:
                    for rank in heard:
                        if self._ranks.channels.get(rank) is channels[rank]:
                            self._hear(rank)
                    self._tell_of_processes()
                    if news := self._ranks.store.news():
                        self._wire.send({"pool": self._pool, "store": True}, news)
                    if time.monotonic() >= due:
                        due = time.monotonic() + BEAT
                        self._beat()
        except (OSError, ContextParallelError) as error:
            log.warning("the connection to ComfyUI has ended: %s", error)
        finally:
            self._wire.close()

    def _hear(self, rank: int) -> None:
        channel = self._ranks.channels[rank]
        try:
            channel.flush()
            while (frame := channel.poll()) is not None:
                self._beat()  # a rank that reports has cleared its notes: older ones would be taken for those of the next command
                self._report(rank, frame.data)
        except Closed:
            del self._ranks.channels[rank]
            channel.close()
            self._wire.send({"pool": self._pool, "closed": rank})

    def _report(self, rank: int, frame: bytes) -> None:
        self._wire.send({"pool": self._pool, "report": rank}, frame)

    def _tell_of_processes(self) -> None:
        ranks = self._ranks
        for rank, process in ranks.processes.items():
            if process.pid and rank not in ranks.told:
                ranks.told.add(rank)
                self._wire.send({"pool": self._pool, "rank": rank, "pid": process.pid})
            if process.returncode is not None and ~rank not in ranks.told:
                ranks.told.add(~rank)
                error = death([], rank, ranks.processes)
                ended = {"rank": rank, "status": process.returncode, "kind": error.kind, "message": error.message}
                self._wire.send({"pool": self._pool, **ended})

    def _beat(self) -> None:
        now, board = time.monotonic(), self._ranks.inherited.board
        rows = [[rank, *board.words(rank, now), process.state] for rank, process in self._ranks.processes.items() if process.pid]
        self._wire.send({"pool": self._pool, "now": now, "board": rows})

    def _write_stacks(self, ranks: Ranks, rank: int) -> None:
        ranks.processes[rank].write_stacks()
        time.sleep(_STACKS)
        fd = ranks.inherited.stacks[rank]
        with contextlib.suppress(OSError):
            self._wire.send({"pool": self._pool, "stacks": rank}, content_of(fd))

    def _end(self) -> None:
        """End the ranks that there are, and say so."""
        ranks = self._ranks
        for process in ranks.processes.values():
            process.kill()
        until = time.monotonic() + 1
        for process in ranks.processes.values():
            process.wait(max(0.0, until - time.monotonic()))
        with contextlib.suppress(OSError):  # ComfyUI is gone
            self._tell_of_processes()
        for channel in ranks.channels.values():
            channel.close()
        ranks.channels.clear()
        ranks.store.close()
        ranks.inherited.close()


def _unpack(packet: dict[str, Any], data: bytearray) -> tuple[Frame, memoryview]:
    """Return a command, and the bytes of its tensors."""
    head = packet["frame"]
    return unpack(bytes(data[:head])), memoryview(data)[head:]


class _Forwarded(logging.Handler):
    """Sends what is logged here to ComfyUI as well. It waits for nothing: threads log while they hold the relay's lock."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(logging.INFO)
        self._wire = wire

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._wire.send_now({"log": record.levelno, "line": record.getMessage()})
