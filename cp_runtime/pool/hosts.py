"""Ranks on other computers: `ssh` starts them there, and its standard input, output and errors are theirs.

A host is a name that ssh knows, from the user's configuration. Nothing of ours listens on a network: ranks meet in a store on
loopback of this computer, which ssh forwards, and connect to each other as those of torchrun do.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache

from ..errors import PoolError
from ..system.interfaces import interface_of
from .blocks import LOOPBACK
from .config import WorkerSite
from .facts import facts_of
from .frames import Frame, Reader
from .messages import Beat, pack
from .processes import PROGRAM, SAME_ORDER, RankProcess, told
from .reached import MARK

OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "ExitOnForwardFailure=yes",
    "ServerAliveInterval=2",
    "ServerAliveCountMax=2",
)
SSH_FAILED = 255
"""Status of ssh itself."""
BEAT = 2.0  # seconds between two signs of life
_PLACE = "CP_HOST_"
_REMEDIES = {
    "this pack": "Update the older one: git pull in custom_nodes/comfyui-context-parallel.",
    "ComfyUI": "Update the older one.",
}


class HostProcess(RankProcess):
    """A rank's process on another computer. `pid` is the one that it has there; signals go to its ssh."""

    def __init__(self, host: str, site: WorkerSite, environment: dict[str, str], port: int) -> None:
        self._host, self._comfyui, self._greeted = host, next(iter(site.path), ""), False
        python, folder, program = place_of(host, self._comfyui)
        there = {**told(site), "path": [folder, *site.path[1:]] if folder else site.path}
        command = command_for(host, [python, "-u", program, "there"], SAME_ORDER | environment, port)
        super().__init__(command, dict(os.environ), there)
        threading.Thread(target=self._beat, name="context-parallel-beats", daemon=True).start()

    @property
    def state(self) -> str:
        return "running" if self.returncode is None else "gone"

    def greeted(self, reader: Reader) -> None:
        if not reader.skip_to(MARK) or (frame := reader.read()) is None:
            return
        hello = json.loads(frame.header)
        self.pid, self._greeted = int(hello["pid"]), True
        if wrong := differences(self._host, self._comfyui, hello["facts"]):
            self.error = PoolError(wrong)
            self.kill()

    def ended(self, status: int) -> None:
        if self.error is None and status == SSH_FAILED:
            lines = "\n".join(self.log.finish())
            what = "the connection to it has ended" if self._greeted else "ssh did not start a rank there"
            self.error = PoolError(f"the computer {self._host}: {what}. {lines}\n{by_hand(self._host)}")
        super().ended(128 - status if 128 < status < SSH_FAILED else status)

    def _beat(self) -> None:
        """Give it signs of life: see `rank_program.SILENT`."""
        while not self.wait(BEAT):
            self.send(Frame(pack(Beat()), urgent=True))


def place_of(host: str, comfyui: str) -> tuple[str, str, str]:
    """Return (Python, folder of ComfyUI, program of ranks) on a host: where `CP_HOST_<host>=/path/to/python:/path/to/ComfyUI` says,
    else the same paths as here."""
    given = os.environ.get(_PLACE + re.sub(r"\W", "_", host), "")
    python, _, folder = given.partition(":")
    if not folder:
        return sys.executable, comfyui, str(PROGRAM)
    relative = os.path.relpath(PROGRAM, comfyui)
    inside = relative if not relative.startswith("..") else os.path.join("custom_nodes", *PROGRAM.parts[-4:])
    return python, folder, os.path.join(folder, inside)


def command_for(host: str, program: Sequence[str], environment: Mapping[str, str], port: int) -> list[str]:
    """Return the command that starts a program on a host. `port`: of the store, to be reached there as here; 0 = of none."""
    words = ["env", *(f"{name}={value}" for name, value in environment.items()), *program]
    forward = ["-R", f"{port}:{LOOPBACK}:{port}"] if port else []
    return ["ssh", "-T", *(part for option in OPTIONS for part in ("-o", option)), *forward, host, shlex.join(words)]


@cache
def _facts(comfyui: str) -> dict[str, str]:
    return facts_of(comfyui)


def differences(host: str, comfyui: str, there: Mapping[str, str]) -> str:
    """Return what has to be the same on a host as here and is not, all at once; empty without a difference."""
    here = _facts(comfyui)
    wrong = [
        f"{name}: {here.get(name, 'none')} here, {there.get(name, 'none')} there. "
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
        lines = subprocess.run(["ssh", "-G", host], capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
        named = dict(line.partition(" ")[::2] for line in lines)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((named["hostname"], int(named["port"])))  # sends nothing
            own = probe.getsockname()[0]
    except (OSError, subprocess.SubprocessError, KeyError) as error:
        raise PoolError(f"the computer {host} is not reached ({error}). {by_hand(host)}") from error
    return interface_of(own, "lo")
