"""The other machines, as ComfyUI's process has them: who has joined, and how the pool reaches ranks there.

A machine is a connection that has proven the code: it takes part from when it has met the others until the connection ends.
`Machine.start` is what `LocalProcess.begin` is on this machine: the pool gives it the same spec and memory, and a
`Bridge` carries what goes between.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..errors import PoolError, ProtocolError, bad_value
from ..pool.blocks import Shared
from ..pool.launcher import LogPump
from ..pool.processes import Hear, RankProcess
from .bridge import Bridge, MachineLost, RemoteProcess
from .facts import differences
from .listener import Listener
from .meeting import MEETING, meet
from .wire import BEAT, Code, Wire, forget_token, interface_of, interfaces, kept_token

log = logging.getLogger("context_parallel")

_LONGEST_NAME = 256
_REFUSED = 64  # computers that are listed with what has to be changed there
_LINE = 1 << 13  # characters of a line of its log
_DEVICE = re.compile(r"cpu|[a-z]{1,15}:[0-9]{1,3}")
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,30}")


@dataclass(eq=False)
class Machine:
    """A machine that joins or has joined. `ready`: it has met the others. `lost`: why it is gone; empty = it is there."""

    owner: Machines
    name: str
    wire: Wire
    devices: tuple[str, ...]
    bridges: dict[str, Bridge] = field(default_factory=dict)
    ready: bool = False
    lost: str = ""
    _met: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    def __str__(self) -> str:
        return f"{self.name} ({self.wire.peer})"

    def start(self, spec: dict[str, Any], environment: dict[str, str], hear: Hear, shared: Shared) -> RankProcess:
        """Ask for a rank and return at once: see `OtherMachine.start`. It has its own machine's environment."""
        name = str(os.fstat(shared.request.fd).st_ino)
        bridge = self.bridges.get(name) or Bridge(self, name, shared)
        with LogPump(f"rank {spec['rank']} on {self.name}") as pump:
            process = RemoteProcess(bridge, spec["rank"], pump, hear)
        self.bridges[name] = bridge
        bridge.add(spec["rank"], process)
        bridge.tell_now(start=spec)
        if self.lost:  # before, or meanwhile
            bridge.lost(MachineLost(self.lost))
        return process

    def meet(self, newcomer: Code) -> str:
        """Have it meet a newcomer: see `meeting.meet`."""
        self._met = queue.SimpleQueue()  # an answer that came too late is not one to this
        with contextlib.suppress(OSError, queue.Empty):
            self.wire.send_now({"meet": [newcomer.address, newcomer.port]})
            return self._met.get(timeout=MEETING + 1)
        return f"{self} did not say whether it reaches {newcomer.address}."

    def serve(self) -> None:
        """Take what it sends until it is gone."""
        offset = float("inf")
        try:
            while True:
                packet, data = self.wire.receive()
                if "now" in packet:
                    offset = min(offset, time.monotonic() - packet["now"])
                if "log" in packet:
                    line = str(packet["line"])[:_LINE].encode(errors="replace").decode().replace("\n", "\n  ")
                    log.log(packet["log"], "[%s] %s", self.name, line)
                elif "met" in packet:
                    self._met.put(str(packet["met"]))
                elif (bridge := self.bridges.get(packet.get("pool", ""))) is not None:
                    bridge.hear(packet, data, offset)
        except TimeoutError:
            why = "gave no sign of life for 5 s: it sleeps or is stopped, or the network between the computers is down"
        except Exception as error:  # noqa: BLE001  (whatever it sends, it alone is gone)
            why = f"has ended, or left ({error})"
        self.end(f"the computer {self} {why}. It is taken in again when it is back.")

    def end(self, why: str) -> None:
        """Note that it is gone, and its ranks with it, unless that is known."""
        if self.lost:
            return
        self.lost = why
        log.warning("%s", why)
        self.wire.close()
        for bridge in list(self.bridges.values()):
            bridge.lost(MachineLost(why))

    def beat(self) -> None:
        """Give it signs of life until it is gone."""
        with contextlib.suppress(OSError):
            while not self.lost:
                self.wire.send_now({"beat": True})
                time.sleep(BEAT)


class Machines:
    """The machines that work for this ComfyUI. Nothing listens, and no thread is there, before `open`.

    Args:
        facts: of this machine, see `facts.facts_of`.
        describe: says what file of a model another machine needs, from the recipe in a load.
    """

    def __init__(
        self,
        facts: Callable[[], dict[str, Any]],
        describe: Callable[[dict[str, Any]], dict[str, Any]] = lambda recipe: {},
    ) -> None:
        self._facts, self.describe = facts, describe
        self.code: Code | None = None
        self._machines: dict[str, Machine] = {}
        self._refused: dict[str, list[str]] = {}  # by name: what has to be changed there
        self._removed: set[str] = set()
        self._listener: Listener | None = None
        self._lock, self._opening = threading.Lock(), threading.Lock()  # of the dictionaries; of the code
        self._meeting = threading.Lock()  # of one newcomer at a time

    @property
    def here(self) -> dict[str, Machine]:
        """The machines that work for this ComfyUI now, by name."""
        return {name: machine for name, machine in sorted(self._machines.items()) if machine.ready and not machine.lost}

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(f"{name}/{device}" for name, machine in self.here.items() for device in machine.devices)

    @property
    def interface(self) -> dict[str, str]:
        """Variables by which ranks of this machine reach those of the others."""
        if self.code is None:
            raise PoolError("no other computer can work for this ComfyUI yet: press Add a computer, or set CP_MACHINES")
        return interfaces(self.code.address)

    def status(self) -> dict[str, Any]:
        """Return the code, and what is to be said of every machine: `state` (joining, refused, ready, lost) and `why`."""
        said: list[dict[str, Any]] = [{"name": name, "state": "refused", "why": why} for name, why in sorted(self._refused.items())]
        for name, machine in sorted(self._machines.items()):
            state = "lost" if machine.lost else "ready" if machine.ready else "joining"
            entry = {"name": name, "state": state, "why": [machine.lost] if machine.lost else []}
            said.append({**entry, "address": machine.wire.peer, "devices": list(machine.devices), "sent": machine.wire.sent})
        return {"code": None if self.code is None else str(self.code), "machines": said}

    def open(self, address: str, port: int) -> Code:
        """Listen for machines on one address. Raises PoolError: it cannot be listened on."""
        with self._opening:
            return self.code or self._open(address, port)

    def _open(self, address: str, port: int) -> Code:
        try:
            interface_of(address)
            self.code = invitation = Code(address, port, kept_token())  # before anybody can say it
            self._listener = Listener(address, port, invitation.token, partial(self._take, invitation=invitation))
        except OSError as error:
            self.code = None
            raise PoolError(f"cannot listen on {address}:{port}: {error.strerror}. Choose another port.") from error
        return invitation

    def remove(self, name: str) -> None:
        """Send a machine away, and let it not come back; with the last one, stop listening, and make the code worthless. Without a
        name, stop listening unless a machine is there. Raises ConfigError: there is no such machine."""
        with self._lock:
            if name and name not in {*self._machines, *self._refused}:
                known = ", ".join(sorted({*self._machines, *self._refused})) or "none: no computer has joined or tried to"
                raise bad_value("remove", name, known, "Send the name of a computer that the panel lists.")
            self._refused.pop(name, None)
            if (machine := self._machines.pop(name, None)) is not None:
                self._removed.add(name)
        if machine is not None:
            machine.end(f"the computer {name} was removed")
        with self._opening:
            if not self._machines:  # one that is lost may come back
                forget_token()
                self.close()

    def close(self) -> None:
        """Stop listening, and let go of all machines."""
        self.code = None
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            gone = list(self._machines.values())
            for kept in (self._machines, self._refused, self._removed):
                kept.clear()
        for machine in gone:
            machine.end("ComfyUI lets no computer work for it any more")

    def _take(self, wire: Wire, invitation: Code) -> None:
        """Have a computer that knows the code work for this ComfyUI until it is gone, unless something differs there."""
        if (machine := self._admit(wire, wire.receive()[0], invitation)) is not None:
            self._take_in(machine, invitation)

    def _admit(self, wire: Wire, hello: dict[str, Any], invitation: Code) -> Machine | None:
        """Compare a machine with this one, and give it its name; or tell it what differs, and return None."""
        name, facts, devices = hello.get("hello"), hello.get("facts"), hello.get("devices")
        known = isinstance(devices, list) and all(isinstance(each, str) and _DEVICE.fullmatch(each) for each in devices)
        if not (known and isinstance(name, str) and len(name) < _LONGEST_NAME and isinstance(facts, dict)):
            raise ProtocolError("the first packet is no hello with name, facts and devices")
        wrong, again = differences(self._facts(), facts), False
        if not _NAME.fullmatch(name):
            wrong.append(f"name: {name!r}; allowed: letters, digits, - and . in lower case. Choose one by --name.")
        with self._lock:
            machine = self._machines.get(name)
            if self.code is not invitation:
                raise ConnectionResetError("ComfyUI does not listen any more")
            if name in self._removed:
                wrong.append("name: this computer was removed. Choose another one by --name to join again.")
            elif machine is not None and not machine.lost:
                # That may be this one, as it was before: its end is noticed in a few seconds.
                again = not wrong
                wrong.append(f"name: another computer is called {name} already. Choose one by --name.")
            elif not wrong:
                self._refused.pop(name, None)
                self._machines[name] = Machine(self, name, wire, tuple(devices or ()))
                return self._machines[name]
            if not again and len(self._refused) < _REFUSED:
                self._refused[name] = wrong
        if not again:
            log.warning("%s (%s) cannot work for this ComfyUI yet:\n  %s", name, wire.peer, "\n  ".join(wrong))
        wire.send({"differ": wrong, "again": again})
        return None

    def _take_in(self, machine: Machine, invitation: Code) -> None:
        """Have a machine meet the others, and then work for this ComfyUI until it is gone."""
        wire = machine.wire
        try:
            wire.send({"welcome": True})
            port = wire.receive()[0].get("listening")
            if not isinstance(port, int) or not 0 < port < 1 << 16:
                raise ProtocolError(f"{machine} listens on no port: {port!r}")
            threading.Thread(target=machine.beat, name="context-parallel-beats", daemon=True).start()
            with self._meeting:
                newcomer = Code(wire.peer, port, invitation.token)
                met = [meet(wire.own, newcomer), *(each.meet(newcomer) for each in self.here.values())]
            if failed := " ".join(filter(None, met)):
                log.warning("%s cannot work for this ComfyUI yet: %s", machine, failed)
                with self._lock:
                    if self._machines.get(machine.name) is machine:  # else it was removed meanwhile
                        self._refused[machine.name] = [failed]
            wire.send({"met": failed})
            if failed:
                return
            machine.ready = True
            log.info("%s works for this ComfyUI, with %s", machine, ", ".join(machine.devices))
            machine.serve()
        finally:
            machine.end(f"the computer {machine} gave up")
            with self._lock:
                if not machine.ready and self._machines.get(machine.name) is machine:  # it gave up: nobody waits for it
                    del self._machines[machine.name]
