"""The other machines, as ComfyUI's process has them: who has joined, and how the pool reaches ranks there.

`Machine.start` is what `ForkServer.start` is on this machine: the pool gives it the same spec and the same descriptors, of a socket
and of memory, and a `Bridge` carries what goes over them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import ContextParallelError, PoolError
from ..pool.forking import RankProcess
from ..pool.launcher import LogPump
from .bridge import Bridge, MachineLost, RemoteProcess
from .facts import differences
from .join import start_agent
from .wire import BEAT, Code, Refused, Wire, forget_token, interface_of, interfaces, kept_token

log = logging.getLogger("context_parallel")

STARTS = 30.0  # seconds in which an agent opens its store
_MOST_STRANGERS = 16  # connections whose proof is waited for
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,30}")


@dataclass(eq=False)
class Machine:
    """A machine that has joined."""

    owner: Machines
    name: str
    wire: Wire
    devices: tuple[str, ...]
    pid: int  # of its relay
    bridges: dict[str, Bridge] = field(default_factory=dict)
    ready: bool = True
    lost: str = ""  # why it is gone; empty = it is there

    def __str__(self) -> str:
        return f"{self.name} ({self.wire.peer})"

    @property
    def state(self) -> str:
        """What the process that its ranks are forked from does."""
        return "gone" if self.lost else "running"

    def wake(self) -> None:
        """Do nothing: the relay looks after its own fork server."""

    def start(self, spec: dict[str, Any], environment: dict[str, str], fds: dict[str, int]) -> RankProcess:
        """Ask for a rank and return at once: see `ForkServer.start`. It has its own machine's environment."""
        name = str(os.fstat(fds["board_fd"]).st_ino)
        bridge = self.bridges.get(name) or Bridge(self, name, spec["world_size"], fds)
        with LogPump(f"rank {spec['rank']} on {self.name}") as pump:
            process = RemoteProcess(self, bridge, spec["rank"], pump)
        if self.lost:
            process.ended(-signal.SIGKILL, MachineLost(self.lost))
            return process
        self.bridges[name] = bridge
        bridge.add(spec["rank"], process, fds)
        bridge.tell(start=spec)
        return process

    def serve(self) -> None:
        """Take what it sends until it is gone."""
        beats = threading.Thread(target=self._beat, name="context-parallel-beats", daemon=True)
        beats.start()
        offset = float("inf")
        try:
            while True:
                packet, data = self.wire.receive()
                if "now" in packet:
                    offset = min(offset, time.monotonic() - packet["now"])
                if "log" in packet:
                    log.log(packet["log"], "[%s] %s", self.name, packet["line"])
                elif (bridge := self.bridges.get(packet.get("pool", ""))) is not None:
                    bridge.hear(packet, data, offset)
        except TimeoutError:
            why = "gave no sign of life for 5 s: it sleeps or is stopped, or the network between the computers is down"
        except (OSError, ContextParallelError, LookupError, TypeError, ValueError) as error:
            why = f"has ended, or left ({error})"
        self.lost = self.lost or f"the computer {self} {why}. It is taken in again when it is back."
        log.warning("%s", self.lost)
        self.wire.close()
        for bridge in list(self.bridges.values()):
            bridge.lost(MachineLost(self.lost))

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            while not self.lost:
                self.wire.send({"beat": True})
                time.sleep(BEAT)


class Machines:
    """The machines that work for this ComfyUI. Nothing listens, and no thread or process is there, before `open`.

    Args:
        facts: of this machine, see `facts.facts_of`.
        busy: whether a prompt runs: a machine that comes back meanwhile waits, if others work on it.
        describe: says what file of a model another machine needs, from the recipe in a load.
        relocate: module, under the package, that finds the file there; empty = recipes go as they are.
    """

    def __init__(
        self,
        facts: Callable[[], dict[str, Any]],
        busy: Callable[[], bool] = lambda: False,
        describe: Callable[[dict[str, Any]], dict[str, Any]] = lambda recipe: {},
        relocate: str = "",
    ) -> None:
        self._facts, self._busy, self.describe, self.relocate = facts, busy, describe, relocate
        self.code: Code | None = None
        self._here: dict[str, Machine] = {}
        self.joining: dict[str, list[str]] = {}  # by name: what has to be changed there; empty = it is on its way
        self._listener: socket.socket | None = None
        self._agent: subprocess.Popen[str] | None = None
        self._store_port = 0
        self._removed: set[str] = set()
        self._strangers = threading.Semaphore(_MOST_STRANGERS)

    @property
    def here(self) -> dict[str, Machine]:
        """The machines that work for this ComfyUI now, by name."""
        return {name: machine for name, machine in sorted(self._here.items()) if not machine.lost}

    @property
    def devices(self) -> tuple[str, ...]:
        """Their devices, such as `pc2/cuda:0`."""
        return tuple(f"{name}/{device}" for name, machine in self.here.items() for device in machine.devices)

    @property
    def interface(self) -> dict[str, str]:
        """Variables by which ranks of this machine reach those of the others."""
        return interfaces(self._code.address)

    @property
    def store(self) -> tuple[str, int]:
        """Address and port of the store in which ranks meet."""
        return self._code.address, self._store_port

    @property
    def _code(self) -> Code:
        if self.code is None:
            raise PoolError("no other computer can work for this ComfyUI yet: press Add a computer, or set CP_MACHINES")
        return self.code

    def status(self) -> dict[str, Any]:
        """Return the code, and what is to be said of every machine: `state` (joining, refused, ready, lost) and `why`."""
        said: list[dict[str, Any]] = [
            {"name": name, "state": "refused" if why else "joining", "why": why} for name, why in self.joining.items()
        ]
        for name, machine in sorted(self._here.items()):
            state = {"state": "lost", "why": [machine.lost]} if machine.lost else {"state": "ready", "why": []}
            entry = {"name": name, **state, "address": machine.wire.peer, "devices": list(machine.devices)}
            said.append({**entry, "sent": machine.wire.sent})
        return {"code": None if self.code is None else str(self.code), "machines": said}

    def open(self, address: str, port: int) -> Code:
        """Listen for machines on one address. Raises PoolError: it cannot be listened on."""
        if self.code is not None:
            return self.code
        try:
            interface_of(address)
            self._listener = socket.create_server((address, port))
        except OSError as error:
            raise PoolError(f"cannot listen on {address}:{port}: {error.strerror}. Choose another port.") from error
        self.code = Code(address, port, kept_token())
        for run in (self._accept, self._keep_agent):
            threading.Thread(target=run, args=(self.code,), name="context-parallel-machines", daemon=True).start()
        return self.code

    def remove(self, name: str) -> None:
        """Send a machine away, and let it not come back; with the last one, stop listening, and make the code worthless."""
        self.joining.pop(name, None)
        self._removed.add(name)
        if (machine := self._here.pop(name, None)) is not None:
            machine.lost = machine.lost or f"the computer {name} was removed"
            machine.wire.close()
        if not self._here:  # one that is lost may come back
            self.close()
            forget_token()

    def close(self) -> None:
        """Stop listening, and let go of all machines."""
        self.code = None
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._agent is not None:
            self._agent.kill()
            self._agent.wait()
        for machine in self._here.values():
            machine.lost = machine.lost or "ComfyUI lets no computer work for it any more"
            machine.wire.close()
        for kept in (self._here, self.joining, self._removed):
            kept.clear()

    def _keep_agent(self, invitation: Code) -> None:
        """Keep torch elastic's agent of this machine running. It ends with the thread that has started it."""
        while self.code is invitation:
            spec = {"address": invitation.address, "host": True, "run_id": invitation.run_id}
            self._agent = agent = start_agent("--agent", spec, stdout=subprocess.PIPE)
            if self.code is not invitation:  # `close` may have found none yet
                agent.kill()
            with agent.stdout or contextlib.nullcontext() as lines:
                self._store_port = int((lines.readline() if lines else "") or 0)
                agent.wait()
            self._store_port = 0
            time.sleep(1)

    def _accept(self, invitation: Code) -> None:
        while self.code is invitation and self._listener is not None:
            try:
                sock, (address, _) = self._listener.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(
                target=self._greet, args=(sock, invitation, address), name="context-parallel-machine", daemon=True
            ).start()

    def _greet(self, sock: socket.socket, invitation: Code, address: str) -> None:
        wire = None
        try:
            try:
                wire = Wire.accept(sock, invitation.token)
            finally:
                self._strangers.release()
            packet, _ = wire.receive()
            if "hello" in packet:
                self._admit(wire, packet)
            elif "relay" in packet:
                self._take_in(wire, packet)
        except Refused as error:
            log.warning("%s, and was told nothing", error)
        except (OSError, ContextParallelError, KeyError, TypeError, ValueError) as error:
            log.info("a connection from %s has ended: %s", address, error)
        finally:
            (sock if wire is None else wire).close()

    def _admit(self, wire: Wire, packet: dict[str, Any]) -> None:
        """Compare a machine with this one, and tell it where the others meet, once that disturbs nobody."""
        name = str(packet["hello"])
        wrong = differences(self._facts(), packet["facts"])
        if not _NAME.fullmatch(name):
            wrong.append(f"name: {name!r}; allowed: letters, digits, - and . in lower case. Choose one by --name.")
        if name in self._removed:
            wrong.append("name: this computer was removed. Choose another one by --name to join again.")
        elif name in self.here:
            wrong.append(f"name: another computer is called {name} already. Choose one by --name.")
        self.joining[name] = wrong
        if wrong:
            log.warning("%s (%s) cannot work for this ComfyUI yet:\n  %s", name, wire.peer, "\n  ".join(wrong))
            wire.send({"differ": wrong})
            return
        until = time.monotonic() + STARTS
        while (self._busy() and self.here) or (not self._store_port and time.monotonic() < until):
            wire.send({"wait": True})
            time.sleep(BEAT)
        wire.send({"store": self.store, "run_id": self._code.run_id})

    def _take_in(self, wire: Wire, packet: dict[str, Any]) -> None:
        """Have a machine work for this ComfyUI, which has exchanged something with the others, until it is gone."""
        name = str(packet["relay"])
        if packet["failed"]:
            self.joining[name] = [str(packet["failed"])]
            log.warning("%s: %s", name, packet["failed"])
            return
        machine = Machine(self, name, wire, tuple(map(str, packet["devices"])), int(packet["pid"]))
        self.joining.pop(name, None)
        self._here[name] = machine
        log.info("%s (%s) works for this ComfyUI, with %s", name, wire.peer, ", ".join(machine.devices))
        machine.serve()
