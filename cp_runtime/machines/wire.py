"""A connection between two machines: who knows the token may speak, then packets, each a JSON object and raw bytes.

Nothing is encrypted, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import select
import socket
import stat
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..cache import cache_folder
from ..errors import PoolError, ProtocolError, bad_value
from ..pool.frames import MAX_HEADER

BEAT = 0.25  # seconds between two signs of life of a connection
SILENT = 5.0  # seconds without one after which the other machine counts as gone
_PIECE = 1 << 16  # bytes that are sent at once, in front of what is urgent: 0.13 s at 4 Mbit/s
_HEAD = struct.Struct("<IIB")  # bytes of the object, bytes after it, and whether more follows
_WHOLE, _MORE, _ABANDONED = range(3)
_MOST = 1 << 26  # bytes of a packet: stacks, reports
_NONCE, _PROOF = 32, 32  # bytes
_TCP_NOTSENT_LOWAT = 25  # tcp(7); Python has no name for it before 3.13
_TOKEN, _LONGEST_TOKEN = re.compile(rb"[A-Za-z0-9_-]{16,64}"), 65


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
        "address", text, "the IPv4 address of one interface and a port, such as 192.168.1.5:8289",
        "Take one address that `ip addr` shows, not 0.0.0.0.",
    )  # fmt: skip


def kept_token() -> str:
    """Return the token of this user, which is the same after a restart of ComfyUI; make one if there is none, or if what is there
    was not made by us or could be read by others.

    Where it cannot be kept, as in a container with a read-only home, the next start has another one.
    """
    file = _token_file()
    with contextlib.suppress(OSError):
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)  # a pipe under this name would block
        try:
            status = os.fstat(fd)
            private = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
            if private and _TOKEN.fullmatch(token := os.read(fd, _LONGEST_TOKEN)):
                return token.decode()
        finally:
            os.close(fd)
    made = secrets.token_urlsafe(24)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        fd, written = tempfile.mkstemp(dir=file.parent)  # readable by this user only
        with open(fd, "w") as out:
            out.write(made)
        os.replace(written, file)
    return made


def forget_token() -> None:
    """Make every code that was given away worthless."""
    with contextlib.suppress(OSError):
        _token_file().unlink()


def _token_file() -> Path:
    return Path(cache_folder()) / "machines-token"


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
    """A connection whose other end has proven that it knows the token. Any thread may send; one receives.

    What is sent in order goes in pieces, and what is urgent goes between two of them: however large a packet is, Cancel, a kill or
    a sign of life waits for one piece at most.

    Attributes:
        own, peer: addresses.
        sent: bytes so far.
    """

    def __init__(self, sock: socket.socket, most: int = _MOST) -> None:
        """`most`: bytes of the largest packet that is received."""
        self._socket, self._most, self.sent = sock, most, 0
        self._lock, self._order = threading.Lock(), threading.Lock()  # of a piece, and of packets that keep their order
        self._urgent: deque[bytes] = deque()
        self._begun: tuple[dict[str, Any], bytearray] | None = None  # a packet whose pieces arrive
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Else megabytes lie in the kernel in front of what is urgent: 8 s at 4 Mbit/s.
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, 2 * _PIECE)
        sock.settimeout(SILENT)
        self.own, self.peer = sock.getsockname()[0], sock.getpeername()[0]

    @classmethod
    def connect(cls, invitation: Code, until: float | None = None, most: int = _MOST) -> Wire:
        """Connect to what listens where a code says. `until`: see `receive`. Raises Refused or OSError."""
        patience = SILENT if until is None else min(SILENT, max(0.001, until - time.monotonic()))
        sock = socket.create_connection((invitation.address, invitation.port), timeout=patience)
        try:
            wire, mine = cls(sock, most), secrets.token_bytes(_NONCE)
            theirs = bytes(wire._read(_NONCE, until))
            where = f"{invitation.address}:{invitation.port}"
            sock.sendall(mine + _proof(invitation.token, "join", where, theirs + mine))
            try:
                answer = bytes(wire._read(_PROOF, until))
            except TimeoutError:  # it is stopped, or busy
                raise
            except OSError as error:
                raise Refused("ComfyUI does not accept this code: it has another one now, which its log and panel show") from error
            if not hmac.compare_digest(answer, _proof(invitation.token, "host", where, mine + theirs)):
                raise Refused(f"what listens on {invitation.address}:{invitation.port} is not the ComfyUI that this code is from")
            return wire
        except BaseException:
            sock.close()
            raise

    @classmethod
    def accept(cls, sock: socket.socket, token: str, most: int = _MOST) -> Wire:
        """Check the other end's proof, and give ours. It is told nothing before, and has SILENT seconds in all. Raises Refused or
        OSError."""
        wire, mine, until = cls(sock, most), secrets.token_bytes(_NONCE), time.monotonic() + SILENT
        where = "{}:{}".format(*sock.getsockname())
        sock.sendall(mine)
        answer = bytes(wire._read(_NONCE + _PROOF, until))
        theirs, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _proof(token, "join", where, mine + theirs)):
            raise Refused(f"a computer at {wire.peer} has the wrong code")
        sock.sendall(_proof(token, "host", where, theirs + mine))
        return wire

    def send(self, packet: Mapping[str, Any], *parts: Any, abandoned: Callable[[], bool] = lambda: False) -> None:
        """Send an object, and the bytes of all parts, after what was sent before. `abandoned`: whether nobody wants the rest any
        more. Raises OSError: the other end is gone, or took none for SILENT seconds."""
        head, pieces = json.dumps(packet).encode(), _pieces(parts)
        with self._order:
            piece: Any = next(pieces, b"")
            while piece is not None:
                following, gone = next(pieces, None), abandoned()
                if gone and head:  # nothing of it is sent yet
                    return
                state = _ABANDONED if gone else _WHOLE if following is None else _MORE
                with self._lock:
                    self._send_urgent()
                    self._write(_HEAD.pack(len(head), 0 if gone else len(piece), state) + head, b"" if gone else piece)
                self._flush()
                head, piece = b"", None if gone else following

    def send_now(self, packet: Mapping[str, Any]) -> None:
        """Send an object before whatever is on its way. Another thread may be the one that sends it, and gets its error."""
        head = json.dumps(packet).encode()
        self._urgent.append(_HEAD.pack(len(head), 0, _WHOLE) + head)
        self._flush()

    def _flush(self) -> None:
        """Send what is urgent, unless a thread is at it, which looks again when it is done."""
        while self._urgent and self._lock.acquire(blocking=False):
            try:
                self._send_urgent()
            finally:
                self._lock.release()

    def _send_urgent(self) -> None:
        while self._urgent:
            self._write(self._urgent.popleft(), b"")

    def _write(self, head: bytes, piece: Any) -> None:
        try:
            self._socket.sendall(head)
            self._socket.sendall(piece)
        except OSError:
            self.close()  # the other end may have half of it: nothing may follow, and who receives is to know
            raise
        self.sent += len(head) + len(piece)

    def receive(self, until: float | None = None) -> tuple[dict[str, Any], bytearray]:
        """Return the next packet.

        Args:
            until: when all of it has to be there, on the clock of `time.monotonic`; None = something in every SILENT seconds.

        Raises:
            OSError: the other end is gone, or silent.
            ProtocolError: it is malformed.
        """
        while True:
            length, size, state = _HEAD.unpack(self._read(_HEAD.size, until))
            if length > MAX_HEADER or size > _PIECE or state not in (_WHOLE, _MORE, _ABANDONED):
                raise ProtocolError(f"a piece of {length} and {size} bytes, state {state}: not allowed")
            if length:
                packet, body = _parse(self._read(length, until)), bytearray()
                if state == _MORE:
                    self._begun = packet, body
            elif self._begun is not None:
                packet, body = self._begun
            else:
                raise ProtocolError("a piece of no packet")
            if len(body) + size > self._most:
                raise ProtocolError(f"a packet of more than {self._most} bytes")
            body += self._read(size, until)
            if state != _MORE and not length:
                self._begun = None
            if state == _WHOLE:
                return packet, body

    def close(self) -> None:
        """End the connection; a thread that receives gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int, until: float | None = None) -> bytearray:
        """Return so many bytes. `until`: see `receive`."""
        data = bytearray(count)
        view, have = memoryview(data), 0
        while have < count:
            if until is not None and not select.select([self._socket], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("not all of it came in time")
            got = self._socket.recv_into(view[have:])
            if not got:
                raise ConnectionResetError("the other computer has closed the connection")
            have += got
        return data


def _pieces(parts: Iterable[Any]) -> Iterator[memoryview]:
    for part in parts:
        body = memoryview(part).cast("B")
        for start in range(0, len(body), _PIECE):
            yield body[start : start + _PIECE]


def _parse(head: bytearray) -> dict[str, Any]:
    try:
        packet = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a packet is not JSON: {error}") from error
    if not isinstance(packet, dict):
        raise ProtocolError("a packet is not a JSON object")
    return packet


def _proof(token: str, role: str, where: str, nonces: bytes) -> bytes:
    """Return a proof for whoever listens at one address and port: passed on to another listener it is worth nothing."""
    return hmac.digest(token.encode(), f"{role} {where} ".encode() + nonces, "sha256")
