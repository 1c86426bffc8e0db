"""The store in which ranks of several computers meet, without a port of its own.

Every rank inherits a socket to it; on another computer a relay carries its bytes over the connection that has proven the code. A
request is a line of JSON, `[operation, arguments]`, and so is its answer; bytes are text of as many characters.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_LONGEST = 1 << 20  # bytes of a request; gloo and NCCL send some hundred
_POLL = 0.005  # seconds between two looks at a key that is waited for; more as time goes on
_SLOWEST = 0.1


class Rendezvous:
    """The values of one pool's ranks, in ComfyUI's process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()
        self._operations: dict[str, Callable[..., Any]] = {
            "set": self._values.__setitem__,
            "get": self._values.get,
            "add": self._add,
            "check": lambda keys: all(key in self._values for key in keys),
            "compare_set": self._compare_set,
            "deleteKey": lambda key: self._values.pop(key, None) is not None,
            "getNumKeys": lambda: len(self._values),
        }

    def connect(self) -> socket.socket:
        """Return a rank's end of a new connection. It lasts until that is closed everywhere."""
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._serve, args=(ours,), name="context-parallel-store", daemon=True).start()
        return theirs

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as lines, contextlib.suppress(OSError):
            while line := lines.readline(_LONGEST):
                sock.sendall(json.dumps(self.answer(line)).encode() + b"\n")

    def answer(self, line: bytes) -> dict[str, Any]:
        """Return the answer to a request: `value`, or `error` where it is malformed."""
        try:
            operation, *arguments = json.loads(line)
            with self._lock:
                return {"value": self._operations[operation](*arguments)}
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, "0")) + amount
        self._values[key] = str(total)
        return total

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        if self._values.get(key, "") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)


class RankStore(dist.Store):
    """A rank's view of its pool's `Rendezvous`, for `init_process_group`. Any thread may use it."""

    def __init__(self, sock: socket.socket, timeout: timedelta) -> None:
        super().__init__()
        self._socket, self._lines, self._lock = sock, sock.makefile("rb"), threading.Lock()
        self.set_timeout(timeout)

    def _ask(self, operation: str, *arguments: Any) -> Any:
        with self._lock:
            self._socket.sendall(json.dumps([operation, *arguments]).encode() + b"\n")
            line = self._lines.readline()
        if not line:
            raise dist.DistNetworkError("the store of the ranks is gone, and ComfyUI with it")
        answer = json.loads(line)
        if "error" in answer:
            raise dist.DistStoreError(f"the store of the ranks refused {operation}: {answer['error']}")
        return answer["value"]

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value."""
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        """Return a value, which is waited for. Raises DistStoreError: it did not come in time."""
        self.wait([key])
        return str(self._ask("get", key)).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return the sum."""
        return int(self._ask("add", key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values. Raises DistStoreError: one had none in time."""
        limit, pause = (timeout or self.timeout).total_seconds(), _POLL
        until = time.monotonic() + limit
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"another rank did not set {', '.join(keys)} within {limit:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _SLOWEST)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set a value if it is the expected one, or if there is none and none is expected; return what it is then."""
        return str(self._ask("compare_set", key, _text(expected), _text(desired))).encode("latin-1")

    def deleteKey(self, key: str) -> bool:  # by its name in C++, as torch calls it
        """Delete a value; return whether there was one."""
        return bool(self._ask("deleteKey", key))

    def getNumKeys(self) -> int:  # the same
        """Return the number of values."""
        return int(self._ask("getNumKeys"))

    def clone(self) -> RankStore:
        """Return the store itself: its lock lets any thread use it."""
        return self


def _text(value: bytes | str) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value.encode().decode("latin-1")
