"""A machine that joins: `join.py` in a process of its own, with another address of loopback, or in another network namespace."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

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
            spares = [("join.py", "join.py", *preloaded.FORK_SERVER)]  # what joins, and what this starts
            self.process = preloaded.start(command, cwd=cwd, env=environment, files=files, spares=spares, wrapper=prefix)

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
