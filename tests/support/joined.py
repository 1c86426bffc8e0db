"""A machine that joins: `join.py` in a process of its own, with another address of loopback, or in another network namespace; or no
more than its connection."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from cp_runtime.machines.meeting import being_met, meet
from cp_runtime.machines.wire import Code, Refused, Wire

from . import preloaded
from .package import ROOT
from .processes import descendants, kill_all

DETECTION = str(Path(__file__).parent / "detection")  # as servers have it
JOIN = ROOT / "cp_runtime" / "machines" / "join.py"


class Joining:
    """A machine that joins, and all its processes. `log`: what it prints."""

    def __init__(
        self,
        code: str,
        log: Path,
        name: str = "pc2",
        options: Sequence[str] = (),
        cwd: Path = ROOT,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        command = [str(JOIN), code, "--name", name, "--cpu", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": DETECTION, **(env or {})}
        with log.open("ab") as out, open(os.devnull, "rb") as nothing:
            files = (nothing.fileno(), out.fileno(), out.fileno())
            self.process = preloaded.start(command, cwd=cwd, env=environment, files=files, ranks=True, wrapper=prefix)

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [psutil.Process(self.process.pid), *descendants(self.process.pid)]
        return []

    def signal(self, number: signal.Signals) -> None:
        """To all its processes at once, as when a computer sleeps or is switched off."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def close(self) -> None:
        kill_all(self.processes)
        self.process.wait()


@contextlib.contextmanager
def joined(*args: Any, **kwargs: Any) -> Iterator[Joining]:
    made = Joining(*args, **kwargs)
    try:
        yield made
    finally:
        made.close()


def pair(host_token: str, join_token: str) -> tuple[Any, Any]:
    """(host's end or error, the other end or error) of a connection between two that know these tokens."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    ends: dict[str, Any] = {}

    def join() -> None:
        try:
            ends["join"] = Wire.connect(Code(address, port, join_token))
        except Exception as error:  # noqa: BLE001
            ends["join"] = error

    thread = threading.Thread(target=join)
    thread.start()
    with listener:
        sock, _ = listener.accept()
    host: Any = None
    try:
        host = Wire.accept(sock, host_token)
    except Refused as error:
        host = error
        sock.close()
    thread.join()
    return host, ends["join"]


def hello(code: Code, name: str, **changes: Any) -> tuple[Wire, dict[str, Any]]:
    """A connection that has said what it is, and the answer."""
    wire = Wire.connect(code)
    wire.send({"hello": name, "facts": {}, "devices": ["cpu"]} | changes)
    return wire, wire.receive()[0]


class Joined:
    """A machine that has joined, and does nothing but meet others. `heard`: what it was sent, except signs of life."""

    def __init__(self, code: Code, name: str, **changes: Any) -> None:
        self.wire, answer = hello(code, name, **changes)
        assert "welcome" in answer, answer
        with being_met(self.wire.own, code.token) as listener:
            self.wire.send({"listening": listener.port})
            while "met" not in answer:
                answer, _ = self.wire.receive()
        assert not answer["met"], answer
        self.heard: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._serve, args=(code.token,), daemon=True)
        self._thread.start()

    def _serve(self, token: str) -> None:
        with contextlib.suppress(OSError):
            while True:
                packet, _ = self.wire.receive()
                if "beat" not in packet:
                    self.heard.append(packet)
                if "meet" in packet:
                    address, port = packet["meet"]
                    self.wire.send({"met": meet(self.wire.own, Code(address, port, token))})

    def close(self) -> None:
        self.wire.close()
        self._thread.join()
