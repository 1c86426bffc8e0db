"""Network interfaces of this computer, on every system: the only module that opens sockets. None waits for other computers."""

from __future__ import annotations

import socket


def interface_of(address: str, otherwise: str) -> str:
    """Return the name of the interface with an address. `otherwise`: where none has it."""
    import psutil  # a requirement of ComfyUI, and of nothing else here

    found = (name for name, each in psutil.net_if_addrs().items() if any(own.address == address for own in each))
    return str(next(found, otherwise))


def interface_towards(address: str, port: int) -> str:
    """Return the name of the interface that leads to an address, and send nothing. Raises OSError: none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        own = probe.getsockname()[0]
    return interface_of(own, "lo")


def listening_port(address: str) -> tuple[int, int]:
    """Listen at a free port of an address of this computer. Returns (port, descriptor, which the caller closes)."""
    listener = socket.create_server((address, 0))
    return int(listener.getsockname()[1]), listener.detach()
