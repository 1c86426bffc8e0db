"""Whether computers reach each other, in both directions and over ports that the system chooses, as their ranks have to.

A newcomer listens while it is met. Everybody else connects to it, says where it listens in turn, and is connected to. Both ends of
every connection prove that they know the code.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from ..errors import ContextParallelError
from .wire import SILENT, Code, Wire

MEETING = 2 * SILENT  # seconds that two computers have to reach each other
_BYTES = bytes(1 << 16)  # that they exchange: a handshake may pass where packets of full size do not


def meet(own: str, newcomer: Code) -> str:
    """Exchange something with a newcomer in both directions, from an address of this computer. Return why that failed, or nothing.
    `newcomer`: where it listens."""
    until = time.monotonic() + MEETING
    try:
        with socket.create_server((own, 0)) as listener, contextlib.closing(Wire.connect(newcomer)) as wire:
            wire.send({"back": listener.getsockname()}, _BYTES)
            with contextlib.closing(_accept(listener, newcomer.token, until)) as back:
                back.receive()
    except (OSError, ContextParallelError) as error:
        return (
            f"the computers at {own} and {newcomer.address} do not reach each other ({error}): ranks talk over ports that the "
            "system chooses. Let the firewalls on both pass everything between them."
        )
    return ""


@contextlib.contextmanager
def being_met(own: str, token: str) -> Iterator[int]:
    """Listen for those who `meet` this computer, on one address, and connect back to them. Yields the port."""
    with socket.create_server((own, 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    threading.Thread(target=_connect_back, args=(sock, token), daemon=True).start()

        threading.Thread(target=run, name="context-parallel-meeting", daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def _connect_back(sock: socket.socket, token: str) -> None:
    with sock, contextlib.suppress(OSError, ContextParallelError, LookupError, TypeError, ValueError):
        wire = Wire.accept(sock, token)
        address, port = wire.receive()[0]["back"]
        with contextlib.closing(Wire.connect(Code(address, port, token))) as back:
            back.send({}, _BYTES)


def _accept(listener: socket.socket, token: str, until: float) -> Wire:
    """Return the first connection that proves that it knows the token; strangers may come before it. Raises OSError."""
    while True:
        listener.settimeout(max(0.001, until - time.monotonic()))
        sock, _ = listener.accept()
        try:
            return Wire.accept(sock, token)
        except (OSError, ContextParallelError):
            sock.close()
