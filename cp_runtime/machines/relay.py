"""What torch elastic runs on every machine, one process each. Together they try whether the machines reach each other. On a machine
that has joined it then starts ranks for the ComfyUI on the other one, and passes on what goes between them.

To its ranks the relay is what ComfyUI's process is to the ranks there: it has forked them, their commands come over a socket that
they inherit, and tensors lie in memory that all of them map. So a tensor comes to a machine once, however many ranks it has.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ContextParallelError, PoolError
from ..pool.board import Inherited
from ..pool.channel import Channel, Closed, SharedBlock, ready
from ..pool.config import WorkerSite
from ..pool.failures import death
from ..pool.fork_server import PACKAGE, import_by_name
from ..pool.forking import FORK_SERVERS, RankProcess
from ..pool.launcher import child_environment
from ..pool.messages import Failure, Frame, Load, pack, unpack
from .wire import BEAT, Code, Wire, interfaces

log = logging.getLogger("context_parallel")

MEETING = 10.0  # seconds that machines have to reach each other
_NUMBERS = 1 << 18  # that they exchange for it
_STACKS = 0.4  # seconds that a rank gets to write its stacks


def run(spec: dict[str, Any]) -> None:
    """Run a relay until its agent ends.

    Args:
        spec: see `elastic.run`; on a machine that joins also `code`, `name`, `device_type`, `devices`, and `site`, `folders`: where
            its ComfyUI is, and its model folders by kind.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s|%(message)s")
    log.setLevel(logging.INFO)
    if spec["host"]:
        meet(spec)
        while True:
            signal.pause()
    failed = ""
    try:
        meet(spec)
    except (RuntimeError, OSError) as error:
        failed = str(error)
    wire = Wire.connect(Code(**spec["code"]))
    wire.send({"relay": spec["name"], "failed": failed, "devices": spec["devices"], "pid": os.getpid()})
    if failed:
        sys.exit(failed)
    Relay(wire, spec).serve()


def meet(spec: dict[str, Any]) -> None:
    """Have the machines' relays exchange something: only then do they reach each other in all directions. Raises PoolError."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world == 1:
        return
    own, limit = spec["address"], timedelta(seconds=MEETING)
    os.environ.update(interfaces(own))
    address, port = spec["store"]
    # torch elastic draws this port anew for every set of machines; nothing listens on it.
    round_ = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
    store = dist.PrefixStore(f"meet/{round_}", dist.TCPStore(address, port, is_master=False, timeout=limit))
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        dist.all_reduce(torch.zeros(_NUMBERS))
    except RuntimeError as error:
        raise PoolError(
            f"the computers do not reach each other ({error}): ranks talk over ports that the system chooses. Let the firewalls on "
            "both pass everything between them."
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass
class Ranks:
    """The ranks of one pool on this machine."""

    inherited: Inherited
    processes: dict[int, RankProcess] = field(default_factory=dict)
    channels: dict[int, Channel] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)  # ranks whose start, or whose end, ComfyUI knows of


class Relay:
    """Serves ComfyUI over a connection. One thread takes what it sends, another what ranks report."""

    def __init__(self, wire: Wire, spec: dict[str, Any]) -> None:
        self._wire, self._spec, self._pool = wire, spec, ""
        self._ranks = Ranks(Inherited(1))
        self._lock = threading.Lock()
        log.addHandler(_Forwarded(wire))

    def serve(self) -> None:
        """Serve until the connection ends; then end this process, and with it the ranks."""
        threading.Thread(target=self._watch, name="context-parallel-ranks", daemon=True).start()
        try:
            while True:
                packet, data = self._wire.receive()
                with self._lock:
                    self._take(packet, data)
        except (OSError, ContextParallelError) as error:
            log.warning("the connection to ComfyUI has ended: %s", error)
            os._exit(1)

    def _take(self, packet: dict[str, Any], data: bytearray) -> None:
        if "start" in packet:
            self._start(packet)
        elif packet.get("pool") != self._pool:
            return  # a sign of life; or for ranks that have ended
        elif "frame" in packet:
            self._pass_on(packet, data)
        elif "decision" in packet:
            self._ranks.inherited.board.decide(packet["decision"])
        elif "signal" in packet and (process := self._ranks.processes.get(packet["rank"])) is not None:
            # `kill` waits for a rank that is not forked yet.
            send = process.kill if packet["signal"] == signal.SIGKILL else partial(process.send_signal, packet["signal"])
            threading.Thread(target=send).start()
        elif "stacks" in packet and (process := self._ranks.processes.get(packet["stacks"])) is not None:
            threading.Thread(target=self._write_stacks, args=(self._ranks, packet["stacks"])).start()
        elif "end" in packet:
            for process in self._ranks.processes.values():
                threading.Thread(target=process.kill).start()

    def _start(self, packet: dict[str, Any]) -> None:
        """Fork a rank. The first one of another pool ends those of the one before."""
        spec = packet["start"]
        rank, world = spec["rank"], spec["world_size"]
        if packet["pool"] != self._pool:
            self._end()
            self._pool, self._ranks = packet["pool"], Ranks(Inherited(world))
        ranks, own = self._ranks, self._spec["site"]
        site = WorkerSite(
            service=spec["service"], arguments=own["arguments"], path=tuple(own["path"]), preload=tuple(spec["preload"]),
            argv=tuple(spec["argv"]),  # options decide how ComfyUI computes
        )  # fmt: skip
        spec["arguments"] = own["arguments"]
        environment = child_environment(self._spec["device_type"], spec["machines"].count(self._spec["name"]))
        server = FORK_SERVERS.get(site, environment)
        ours, theirs = socket.socketpair()
        with theirs:
            ranks.channels[rank] = Channel(ours)
            fds = {"channel_fd": theirs.fileno(), **ranks.inherited.descriptors(rank)}
            ranks.processes[rank] = server.start(spec, environment | interfaces(self._wire.own), fds)

    def _pass_on(self, packet: dict[str, Any], data: bytearray) -> None:
        """Pass a command on to all ranks, once its tensors lie in memory that they map."""
        head = packet["frame"]
        frame, tensors = unpack(bytes(data[:head])), memoryview(data)[head:]
        ranks = self._ranks
        if "memory" in packet:  # weight patches, which ranks keep
            try:
                frame = self._relocated(frame, tensors, packet)
            except ContextParallelError as error:
                for rank in ranks.channels:
                    failure = Failure(at=time.monotonic(), kind=type(error).__name__, message=str(error), trace="")
                    self._report(rank, pack(failure, frame.seq))
                return
        elif tensors:
            ranks.inherited.request.view(len(tensors)).copy_(torch.frombuffer(tensors, dtype=torch.uint8))
        ranks.inherited.board.undecided()
        for channel in ranks.channels.values():
            with contextlib.suppress(Closed):
                channel.send(frame.data)

    def _relocated(self, frame: Frame, tensors: memoryview, packet: dict[str, Any]) -> Frame:
        """Return a load whose file is the one on this machine, and whose patches lie in this process's memory."""
        message = frame.message
        if not isinstance(message, Load):
            raise PoolError(f"a {frame.kind} with memory of its own")
        module = import_by_name(f"{PACKAGE}.{packet['relocate']}") if packet["relocate"] else None
        recipe = module.relocate(message.recipe, packet["files"], self._spec["folders"], self._spec["name"]) if module else {}
        self._kept = SharedBlock()  # until the next load: ranks map it while they load
        if tensors:
            self._kept.view(len(tensors)).copy_(torch.frombuffer(tensors, dtype=torch.uint8))
        else:
            self._kept.view(0)
        moved = replace(message, recipe=recipe or message.recipe, memory=(os.getpid(), self._kept.fd))
        return unpack(pack(moved, frame.seq, frame.nbytes))

    def _watch(self) -> None:
        """Tell ComfyUI what ranks report, how far they are, and that they have ended. Without it, nothing works: so end with it."""
        due = 0.0
        try:
            while True:
                with self._lock:
                    channels = dict(self._ranks.channels)
                heard = ready(channels, 0.02 if channels else 0.1)
                with self._lock:
                    for rank in heard:
                        if self._ranks.channels.get(rank) is channels[rank]:
                            self._hear(rank)
                    self._tell_of_processes()
                    if time.monotonic() >= due:
                        due = time.monotonic() + BEAT
                        self._beat()
        except (OSError, ContextParallelError) as error:
            log.warning("the connection to ComfyUI has ended: %s", error)
        finally:
            os._exit(1)

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
            self._wire.send({"pool": self._pool, "stacks": rank}, os.pread(fd, os.fstat(fd).st_size, 0))

    def _end(self) -> None:
        """End the ranks that there are, and say so."""
        ranks = self._ranks
        for process in ranks.processes.values():
            process.kill()
        for process in ranks.processes.values():
            process.wait(1)
        self._tell_of_processes()
        for channel in ranks.channels.values():
            channel.close()
        ranks.inherited.close()


class _Forwarded(logging.Handler):
    """Sends what is logged here to ComfyUI as well."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(logging.INFO)
        self._wire = wire

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._wire.send({"log": record.levelno, "line": record.getMessage()})
