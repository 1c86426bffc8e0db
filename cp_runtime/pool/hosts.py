"""Ranks on other computers: `ssh` starts them there, and its standard input, output and errors are theirs.

A host is a name that ssh knows, from the user's configuration. Nothing of ours listens on a network: ranks meet in a store on
loopback of this computer, which ssh forwards, and connect to each other as those of torchrun do.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ..errors import PoolError
from ..system.environment import HOST, host_setting, whole_environment
from ..system.interfaces import interface_towards
from ..system.programs import output_of
from .blocks import LOOPBACK
from .config import WorkerSite
from .facts import MISSING, facts_of
from .frames import Frame, Malformed, Reader
from .launcher import starting
from .messages import Beat, pack
from .processes import PROGRAM, SAME_ORDER, RankProcess, site_message
from .remote import MARK

OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "ConnectTimeout=10",  # a computer that sleeps gives no answer
    "ExitOnForwardFailure=yes",
    # A pulled cable closes no connection: ssh gives up after two intervals without an answer.
    "ServerAliveInterval=2",
    "ServerAliveCountMax=2",
)
SSH_FAILED = 255
"""Status of ssh itself."""
BEAT = 2.0  # seconds between two signs of life: several within `rank_program.SILENCE_LIMIT`, as one may be late
CHECK_TIMEOUT = 60.0  # seconds that a host has to name its devices: it may import torch from a disk
END_TIMEOUT = 2.0  # seconds that the kernel has to end a killed ssh
READY, UNREACHED, DIFFERS = "ready", "not reached", "differs"
"""How a host is: it can work for this computer; ssh does not get there, or starts nothing; something else is missing."""
DEVICES = "cp_runtime.pool.devices"  # its name in a rank
_ASLEEP = ("timed out", "No route to host")  # ssh's words
_REMEDIES = {
    "this pack": "Update the older one: git pull in custom_nodes/comfyui-context-parallel.",
    "ComfyUI": "Update the older one.",
}


class HostProcess(RankProcess):
    """A rank's process on another computer. `pid` is the one that it has there; signals go to its ssh. `reached`: it has begun."""

    def __init__(self, host: str, site: WorkerSite, environment: dict[str, str], port: int) -> None:
        self._host, self._comfyui, self.reached = host, next(iter(site.path), ""), False
        python, folder, program = place_of(host, self._comfyui)
        there = {**site_message(site), "path": [folder, *site.path[1:]] if folder else site.path}
        command = command_for(host, [python, "-u", program, "there"], SAME_ORDER | environment, port)
        super().__init__(command, whole_environment(), there)
        threading.Thread(target=self._beat, name="context-parallel-beats", daemon=True).start()

    @property
    def state(self) -> str:
        return "running" if self.returncode is None else "gone"

    def read_greeting(self, reader: Reader) -> None:
        if not reader.skip_to(MARK) or (frame := reader.read()) is None:
            return
        hello = json.loads(frame.header)
        self.pid, self.reached = int(hello["pid"]), True
        if wrong := differences(self._host, self._comfyui, hello["facts"]):
            self.error = PoolError(wrong)
            self.kill()

    def ended(self, status: int) -> None:
        if self.error is None and (status == SSH_FAILED or (status >= 0 and not self.reached)):
            lines = "\n".join(self.log.finish())
            what = "the connection to it has ended" if self.reached else "ssh did not start a rank there"
            elsewhere = f"If Python or ComfyUI are in other places there, say so in {_place(self._host)}: see docs/machines.md."
            remedy = by_hand(self._host) if status == SSH_FAILED else elsewhere
            asleep = " It may sleep, or be switched off." if any(words in lines for words in _ASLEEP) else ""
            self.error = PoolError(f"the computer {self._host}: {what}.{asleep} {lines}\n{remedy}")
        # `ssh_guard` exits as a shell does, with 128 and the number of a signal, of which `Popen` has the negative.
        super().ended(128 - status if 128 < status < SSH_FAILED else status)

    def _beat(self) -> None:
        """Give it signs of life: see `rank_program.SILENCE_LIMIT`."""
        while not self.wait(BEAT):
            self.send(Frame(pack(Beat()), urgent=True))


def place_of(host: str, comfyui: str) -> tuple[str, str, str]:
    """Return (Python, folder of ComfyUI, program of ranks) on a host: where `CP_HOST_<host>=/path/to/python:/path/to/ComfyUI` says,
    else the same paths as here."""
    given = host_setting(_place(host))
    python, _, folder = given.partition(":")
    if not folder:
        return sys.executable, comfyui, str(PROGRAM)
    relative = os.path.relpath(PROGRAM, comfyui)
    inside = relative if not relative.startswith("..") else os.path.join("custom_nodes", *PROGRAM.parts[-4:])
    return python, folder, os.path.join(folder, inside)


def _place(host: str) -> str:
    return HOST + re.sub(r"\W", "_", host)


def command_for(host: str, program: Sequence[str], environment: Mapping[str, str], port: int) -> list[str]:
    """Return the command that starts a program on a host. `port`: of the store, to be reached there as here; 0 = of none."""
    words = ["env", *(f"{name}={value}" for name, value in environment.items()), *program]
    forward = ["-R", f"{port}:{LOOPBACK}:{port}"] if port else []
    return ["ssh", "-T", *(part for option in OPTIONS for part in ("-o", option)), *forward, host, shlex.join(words)]


@cache
def _facts(comfyui: str) -> dict[str, str]:
    return facts_of(comfyui)


def differences(host: str, comfyui: str, there: Mapping[str, str]) -> str:
    """Return all differences from a host that ranks cannot work with; empty without any."""
    here = _facts(comfyui)
    wrong = [
        f"{name}: {here.get(name, MISSING)} here, {there.get(name, MISSING)} there. "
        + _REMEDIES.get(name, f"Install the same version: pip install {name}=={here.get(name, there.get(name))}")
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    ]
    return f"the computer {host} cannot work for this ComfyUI yet:\n  " + "\n  ".join(wrong) if wrong else ""


def by_hand(host: str) -> str:
    return f"See what this says: ssh -o BatchMode=yes {host} true"


def interface_to(host: str) -> str:
    """Return the network interface by which a host is reached. Raises PoolError: ssh does not know it, or no name leads there."""
    try:
        named = dict(line.partition(" ")[::2] for line in output_of(["ssh", "-G", host], seconds=10))
        return interface_towards(named["hostname"], int(named["port"]))
    except (OSError, KeyError) as error:
        raise PoolError(f"the computer {host} is not reached ({error}). {by_hand(host)}") from error


def check(host: str, site: WorkerSite, kind: str) -> tuple[str, str, list[dict[str, Any]]]:
    """Start a process on a host as for a rank, have it name its devices of a type, and end it. Returns how the host is, what is
    wrong, in the words that a prompt would fail with, and the devices: see `devices.devices_of`."""
    answers: queue.SimpleQueue[Frame | Malformed | None] = queue.SimpleQueue()
    try:
        interface_to(host)
        with starting():
            process = HostProcess(host, replace(site, preload=("torch",)), {}, 0)
    except PoolError as error:
        return UNREACHED, str(error), []
    process.begin({"rank": host, "program": DEVICES, "kind": kind}, {}, answers.put)
    try:
        answer = answers.get(timeout=CHECK_TIMEOUT)
        found = json.loads(answer.header) if isinstance(answer, Frame) else []
        wrong = f"the computer {host} has no {kind} device that torch there has code for."
        if not isinstance(answer, Frame):
            last = "".join(process.log.finish()[-1:])
            wrong = str(process.error or f"the computer {host} did not name its devices. {last}")
    except queue.Empty:
        found, wrong = [], f"the computer {host} has not named its devices within {CHECK_TIMEOUT:g} s. {by_hand(host)}"
    finally:
        process.kill()
        process.wait(END_TIMEOUT)
    if not found:
        return DIFFERS if process.reached else UNREACHED, wrong, []
    return READY, "", [{**device, "name": f"{host}/{device['name']}"} for device in found]
