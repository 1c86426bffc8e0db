"""Greets whoever connects to this computer: who proves that it knows the token is taken in, each in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from ..errors import ContextParallelError
from .wire import BEAT, Refused, Wire

log = logging.getLogger("context_parallel")

MOST, OF_ONE_ADDRESS = 64, 4  # connections whose proof is waited for. A proof takes one round trip: the oldest gives way


class Listener:
    """Listens on one address until it is closed. Raises OSError: it cannot be listened on.

    Args:
        port: 0 = one that the system chooses.
        take: called with every connection that has given its proof; it is closed when this returns or raises.
    """

    def __init__(self, address: str, port: int, token: str, take: Callable[[Wire], None]) -> None:
        self._socket = socket.create_server((address, port))
        self._token, self._take, self.closed = token, take, False
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, str] = {}  # the oldest first; its address
        self.address: str
        self.port: int
        self.address, self.port = self._socket.getsockname()
        threading.Thread(target=self._run, name="context-parallel-listener", daemon=True).start()

    def close(self) -> None:
        """Listen no more. Those who were taken in stay."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self.closed:
            try:
                sock, (address, _) = self._socket.accept()
            except OSError:
                time.sleep(BEAT)  # no more descriptors, for now; or it is closed
                continue
            self._wait_for(sock, address)
            threading.Thread(target=self._greet, args=(sock, address), name="context-parallel-greeting", daemon=True).start()

    def _wait_for(self, sock: socket.socket, address: str) -> None:
        with self._lock:
            of_one = [each for each, own in self._waiting.items() if own == address]
            crowd, most = (of_one, OF_ONE_ADDRESS) if len(of_one) >= OF_ONE_ADDRESS else (list(self._waiting), MOST)
            for each in crowd[: len(crowd) - most + 1]:
                del self._waiting[each]
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._waiting[sock] = address

    def _greet(self, sock: socket.socket, address: str) -> None:
        wire = None
        try:
            try:
                wire = Wire.accept(sock, self._token)
            finally:
                with self._lock:
                    self._waiting.pop(sock, None)
            self._take(wire)
        except Refused as error:
            log.warning("%s, and was told nothing", error)
        except (OSError, ContextParallelError, LookupError, TypeError, ValueError, OverflowError) as error:
            log.info("a connection from %s has ended: %s", address, error)
        finally:
            (sock if wire is None else wire).close()
