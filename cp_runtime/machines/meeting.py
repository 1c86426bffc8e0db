"""Whether computers reach each other, in both directions and over ports that the system chooses, as their ranks have to.

A newcomer listens while it is met. Everybody else connects to it, says where it listens in turn, and is connected to. Both ends of
every connection prove that they know the code.
"""

from __future__ import annotations

import contextlib
import queue
import time

from ..errors import ContextParallelError
from .listener import Listener
from .wire import SILENT, Code, Wire

MEETING = 2 * SILENT  # seconds that two computers have to reach each other
_BYTES = bytes(1 << 16)  # that they exchange: a handshake may pass where packets of full size do not


def meet(own: str, newcomer: Code) -> str:
    """Exchange something with a newcomer in both directions, from an address of this computer. Return why that failed, or nothing.
    `newcomer`: where it listens."""
    until, heard = time.monotonic() + MEETING, queue.SimpleQueue[object]()
    try:
        with (
            Listener(own, 0, newcomer.token, lambda back: heard.put(back.receive(until))) as listener,
            contextlib.closing(Wire.connect(newcomer, until)) as wire,
        ):
            wire.send({"back": [listener.address, listener.port]}, _BYTES)
            heard.get(timeout=max(0.0, until - time.monotonic()))
    except queue.Empty:
        return _apart(own, newcomer, f"nothing came back in {MEETING:g} s")
    except (OSError, ContextParallelError) as error:
        return _apart(own, newcomer, error)
    return ""


def being_met(own: str, token: str) -> Listener:
    """Listen for those who `meet` this computer, on one address, and connect back to them."""

    def connect_back(wire: Wire) -> None:
        until = time.monotonic() + MEETING
        address, port = wire.receive(until)[0]["back"]
        with contextlib.closing(Wire.connect(Code(address, port, token), until)) as back:
            back.send({}, _BYTES)

    return Listener(own, 0, token, connect_back)


def _apart(own: str, newcomer: Code, why: object) -> str:
    return (
        f"the computers at {own} and {newcomer.address} do not reach each other ({why}): ranks talk over ports that the "
        "system chooses. Let the firewalls on both pass everything between them."
    )
