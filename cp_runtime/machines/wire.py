"""A connection between two machines: who knows the token may speak, then packets, each a JSON object and raw bytes.

Nothing is encrypted, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..errors import PoolError, ProtocolError, bad_value
from ..pool.launcher import cache_folder
from ..pool.messages import MAX_HEADER

BEAT = 0.25  # seconds between two signs of life of a connection
SILENT = 5.0  # seconds without one after which the other machine counts as gone
_PIECE = 1 << 18  # bytes that are sent at once: a slow link is no silent one
_LENGTHS = struct.Struct("<QQ")  # of the object, and of the bytes
_MAX_BYTES = 1 << 36
_NONCE, _PROOF = 32, 32  # bytes


class Refused(PoolError):
    """The other side does not know the token."""


@dataclass(frozen=True)
class Code:
    """What a person carries from one machine to the other: where ComfyUI listens, and the token. As text `address:port/token`."""

    address: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.address}:{self.port}/{self.token}"

    @property
    def run_id(self) -> str:
        """Name of the rendezvous, which does not give the token away."""
        return hmac.digest(self.token.encode(), b"run", "sha256").hex()[:16]

    @classmethod
    def parse(cls, text: str) -> Code:
        """Read a code. Raises ConfigError: it is none."""
        where, _, token = text.strip().partition("/")
        address, port = parse_address(where)
        if not token:
            raise bad_value("code", text, "address:port/token, as ComfyUI shows it", "Copy all of it.")
        return cls(address, port, token)


def parse_address(text: str) -> tuple[str, int]:
    """Return (address, port) from `address:port`. Raises ConfigError: not an IPv4 address of one interface, or no port."""
    host, _, port = text.strip().rpartition(":")
    with contextlib.suppress(ValueError):
        if 0 < int(port) < 1 << 16 and not ipaddress.IPv4Address(host).is_unspecified:
            return host, int(port)
    raise bad_value(
        "CP_MACHINES", text, "the IPv4 address of one interface and a port, such as 192.168.1.5:8289",
        "Take one address that `ip addr` shows, not 0.0.0.0.",
    )  # fmt: skip


def kept_token() -> str:
    """Return the token of this user, which is the same after a restart of ComfyUI; make one if there is none.

    Where it cannot be kept, as in a container with a read-only home, the next start has another one.
    """
    file = Path(cache_folder()) / "machines-token"
    with contextlib.suppress(OSError):
        if token := file.read_text().strip():
            return token
    token = secrets.token_urlsafe(24)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(token)
    return token


def forget_token() -> None:
    """Make every code that was given away worthless."""
    with contextlib.suppress(OSError):
        (Path(cache_folder()) / "machines-token").unlink()


def own_address() -> str:
    """Return the IPv4 address that this computer has towards others, 127.0.0.1 without a network. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # for documentation (RFC 5737), and so outside of every network
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def interface_of(address: str) -> str:
    """Return the name of the interface with an address. Raises PoolError: no interface has it."""
    if ipaddress.IPv4Address(address).is_loopback:
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    raise PoolError(f"no interface of this computer has the address {address}; `ip addr` shows those that there are")


def interfaces(address: str) -> dict[str, str]:
    """Return variables by which ranks on the machine with an address reach those of others. Raises PoolError."""
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface_of(address))


class Wire:
    """A connection whose other end has proven that it knows the token. Any thread may send; one receives. `own`, `peer`: addresses.
    `sent`: bytes so far."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._lock, self.sent = sock, threading.Lock(), 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(SILENT)
        self.own, self.peer = sock.getsockname()[0], sock.getpeername()[0]

    @classmethod
    def connect(cls, invitation: Code) -> Wire:
        """Connect to the ComfyUI of a code. Raises Refused or OSError."""
        sock = socket.create_connection((invitation.address, invitation.port), timeout=SILENT)
        try:
            wire, mine = cls(sock), secrets.token_bytes(_NONCE)
            theirs = bytes(wire._read(_NONCE))
            sock.sendall(mine + _proof(invitation.token, b"join", theirs + mine))
            try:
                answer = bytes(wire._read(_PROOF))
            except OSError as error:
                raise Refused("ComfyUI does not accept this code: it has another one now, which its log and panel show") from error
            if not hmac.compare_digest(answer, _proof(invitation.token, b"host", mine + theirs)):
                raise Refused(f"what listens on {invitation.address}:{invitation.port} is not the ComfyUI that this code is from")
            return wire
        except BaseException:
            sock.close()
            raise

    @classmethod
    def accept(cls, sock: socket.socket, token: str) -> Wire:
        """Check the other end's proof, and give ours. It is told nothing before. Raises Refused or OSError."""
        wire, mine = cls(sock), secrets.token_bytes(_NONCE)
        sock.sendall(mine)
        answer = bytes(wire._read(_NONCE + _PROOF))
        theirs, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _proof(token, b"join", mine + theirs)):
            raise Refused(f"a computer at {wire.peer} has the wrong code")
        sock.sendall(_proof(token, b"host", theirs + mine))
        return wire

    def send(self, packet: Mapping[str, Any], data: Any = b"") -> None:
        """Send an object, and bytes. Raises OSError: the other end is gone, or took none for SILENT seconds."""
        head, body = json.dumps(packet).encode(), memoryview(data).cast("B")
        with self._lock:
            self._socket.sendall(_LENGTHS.pack(len(head), len(body)) + head)
            for start in range(0, len(body), _PIECE):
                self._socket.sendall(body[start : start + _PIECE])
            self.sent += _LENGTHS.size + len(head) + len(body)

    def receive(self) -> tuple[dict[str, Any], bytearray]:
        """Return the next packet. Raises OSError: the other end is gone, or silent; ProtocolError: it is malformed."""
        head, body = _LENGTHS.unpack(self._read(_LENGTHS.size))
        if head > MAX_HEADER or body > _MAX_BYTES:
            raise ProtocolError(f"a packet of {head} and {body} bytes is above the limit")
        try:
            packet = json.loads(self._read(head))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a packet is not JSON: {error}") from error
        if not isinstance(packet, dict):
            raise ProtocolError("a packet is not a JSON object")
        return packet, self._read(body)

    def close(self) -> None:
        """End the connection; a thread that receives gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, have = memoryview(data), 0
        while have < count:
            got = self._socket.recv_into(view[have:])
            if not got:
                raise ConnectionResetError("the other computer has closed the connection")
            have += got
        return data


def _proof(token: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), role + nonces, "sha256")
