"""Starts ranks on a machine that has joined, for the ComfyUI on another one, and passes on what goes between them.

To its ranks the relay is what ComfyUI's process is to the ranks there: it has started them, and tensors lie in memory that all of
them map. So a tensor comes to a machine once, however many ranks it has.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch

from ..errors import ContextParallelError
from ..pool.blocks import Shared, SharedBlock
from ..pool.config import WorkerSite
from ..pool.failures import death
from ..pool.frames import Frame, Malformed
from ..pool.launcher import child_environment, name_limit
from ..pool.messages import Header, Load, pack, unpack
from ..pool.processes import WAITING, RankProcess
from ..pool.rank_program import PACKAGE, import_by_name
from .bridge import failure
from .meeting import meet
from .store import StoreFile
from .wire import BEAT, Code, Wire, interfaces

log = logging.getLogger("context_parallel")

_RECIPES = f"{PACKAGE}.comfy.shared.recipe"  # finds the file of a load here, whatever ComfyUI's side sends


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

    shared: Shared = field(default_factory=Shared)
    processes: dict[int, RankProcess] = field(default_factory=dict)
    heard: queue.SimpleQueue[tuple[int, Frame | Malformed | None]] = field(default_factory=queue.SimpleQueue)
    store: StoreFile = field(init=False)
    told: set[int] = field(default_factory=set)  # ranks whose start, or whose end, ComfyUI knows of
    stacks: dict[int, int] = field(default_factory=dict)  # lines of a rank's stacks that it knows of

    def __post_init__(self) -> None:
        self.store = StoreFile(self.shared.store)


class Relay:
    """Serves ComfyUI over a connection. One thread takes what it sends, another what ranks report."""

    def __init__(self, wire: Wire, place: Place, token: str) -> None:
        self._wire, self._place, self._token, self._pool = wire, place, token, ""
        self._ranks = Ranks()
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
            frame, header, tensors = _unpack(packet, data)
            if header.kind == Load.__name__:  # what takes a while must not keep a kill waiting
                threading.Thread(target=self._load, args=(self._ranks, header, tensors, packet["files"]), daemon=True).start()
                return
            if tensors:
                self._ranks.shared.request.view(len(tensors)).copy_(torch.frombuffer(tensors, dtype=torch.uint8))
            self._pass_on(frame)
        elif "store" in packet:
            self._ranks.store.append(data)
        elif "urgent" in packet and (process := self._ranks.processes.get(packet["rank"])) is not None:
            process.send(Frame(packet["urgent"].encode(), urgent=True))
        elif "signal" in packet and (process := self._ranks.processes.get(packet["rank"])) is not None:
            process.send_signal(packet["signal"])
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
        rank = spec["rank"]
        if packet["pool"] != self._pool:
            self._end()
            self._pool, self._ranks = packet["pool"], Ranks()
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
        ranks.processes[rank] = process
        process.begin(spec | ranks.shared.addresses, environment | interfaces(self._wire.own), partial(_put, ranks.heard, rank))

    def _pass_on(self, frame: Frame) -> None:
        for process in self._ranks.processes.values():
            process.send(frame)

    def _load(self, ranks: Ranks, header: Header, tensors: memoryview, file: dict[str, Any]) -> None:
        """Pass a load on, whose file is the one on this machine."""
        try:
            frame = self._relocated(header, tensors, file)
        except Exception as error:  # noqa: BLE001  (the prompt fails with it)
            report = pack(failure(error), header.seq)
            with self._lock, contextlib.suppress(OSError):
                for rank in ranks.processes:
                    self._report(rank, report)
            return
        with self._lock:
            if self._ranks is ranks:
                self._pass_on(frame)

    def _relocated(self, header: Header, tensors: memoryview, file: dict[str, Any]) -> Frame:
        """Return a load whose file is the one on this machine, and whose patches lie in this process's memory. `file`: as
        `comfy.shared.recipe.describe` says what it is."""
        message = cast(Load, header.message)
        recipe = import_by_name(_RECIPES).relocate(message.recipe, file, self._place.folders, self._place.name)
        self._kept = SharedBlock()  # until the next load: ranks map it while they load
        if tensors:
            self._kept.view(len(tensors)).copy_(torch.frombuffer(tensors, dtype=torch.uint8))
        else:
            self._kept.view(0)
        moved = replace(message, recipe=recipe, memory=self._kept.address)
        return Frame(pack(moved, header.seq, header.nbytes, header.seconds))

    def _watch(self) -> None:
        """Tell ComfyUI what ranks report, how far they are, and that they have ended. The connection ends with this."""
        due = 0.0
        try:
            while not self._over:
                ranks, heard = self._ranks, []
                with contextlib.suppress(queue.Empty):
                    heard.append(ranks.heard.get(timeout=0.02 if ranks.processes else 0.1))
                    while True:
                        heard.append(ranks.heard.get_nowait())
                with self._lock:
                    if ranks is not self._ranks:  # those have ended
                        continue
                    for rank, frame in heard:
                        if isinstance(frame, Frame):
                            self._report(rank, frame.header)
                    self._tell_of_processes()
                    if news := ranks.store.news():
                        self._wire.send({"pool": self._pool, "store": True}, news)
                    if time.monotonic() >= due:
                        due = time.monotonic() + BEAT
                        self._beat()
        except (OSError, ContextParallelError) as error:
            log.warning("the connection to ComfyUI has ended: %s", error)
        finally:
            self._wire.close()

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
        states = [[rank, process.state] for rank, process in self._ranks.processes.items() if process.pid]
        self._wire.send({"pool": self._pool, "now": time.monotonic(), "states": states})
        for rank, process in self._ranks.processes.items():
            lines = list(process.log.stacks)
            if len(lines) != self._ranks.stacks.get(rank, 0):
                self._ranks.stacks[rank] = len(lines)
                self._wire.send({"pool": self._pool, "stack": rank, "lines": lines})

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
        ranks.store.close()
        ranks.shared.close()


def _unpack(packet: dict[str, Any], data: bytearray) -> tuple[Frame, Header, memoryview]:
    """Return a command, its header, and the bytes of its tensors."""
    head = packet["frame"]
    frame = Frame(bytes(data[:head]))
    return frame, unpack(frame.header), memoryview(data)[head:]


def _put(heard: queue.SimpleQueue[Any], rank: int, frame: Frame | Malformed | None) -> None:
    heard.put((rank, frame))


class _Forwarded(logging.Handler):
    """Sends what is logged here to ComfyUI as well. It waits for nothing: threads log while they hold the relay's lock."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(logging.INFO)
        self._wire = wire

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._wire.send_now({"log": record.levelno, "line": record.getMessage()})
