"""Faults of ranks on a real server: what the prompt says, how soon, and whether the next prompt is right.

On a GPU with real ones: memory that is not there, an assertion in a kernel, a kernel that does not end.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from support import checkpoints
from support.faults import SLACK, Faults
from support.graphs import flux_prompt

from .section import NEEDS_CARD, Section
from .server import LARGEST, TIMEOUT, Server, largest, new_models, used_device_memory

STEP_TIMEOUT = 8.0
LOGGED = 10_000  # characters of the server's log that are shown with a fault that was not told
BACK = 0.3  # GB; what may be missing of the device's memory afterwards


@dataclass(frozen=True)
class Fault:
    """A fault of rank 1.

    Args:
        kind: as in `tests/support/faulty_worker.py`.
        seconds: from the queue to the end of the prompt, at most.
        words: in its message; without any, the prompt succeeds.
        times: calls in a row that have it.
        card: whether it takes one that is there.
    """

    kind: str
    seconds: float
    words: tuple[str, ...] = ()
    times: int = 1
    card: bool = False


FAULTS = {
    "SIGKILL in a call": Fault("kill", 5, ("rank 1", "SIGKILL")),
    "an error on one rank": Fault("error", 5, ("rank 1", "injected")),
    "a hang": Fault("sleep", STEP_TIMEOUT + 5, ("rank 1", "timed out")),
    # Room is made, and the call tried once more.
    "out of device memory, until room is made": Fault("device memory", 20),
    "out of device memory": Fault("device memory", 20, ("rank 1", "OutOfMemory"), times=2),
    "an assertion in a kernel": Fault("device assert", 10, ("rank 1", "CUDA error"), card=True),
    "a kernel that does not end": Fault("device hang", STEP_TIMEOUT + 10, ("rank 1",), card=True),
}


def faults(section: Section) -> None:
    """Report on every fault."""
    models = new_models()
    checkpoints.write("flux", models)
    with StruckServer(section, models, "--fp32-unet", cp={**section.ranks(2), "step_timeout": STEP_TIMEOUT}) as server:
        for name, fault in list(FAULTS.items())[: 1 if section.few else None]:
            if fault.card and section.rehearse:
                section.add(name, NEEDS_CARD)
            else:
                server.strike(name, fault)
        if not section.few:
            server.cancel()


class StruckServer(Server):
    """A server whose ranks get faults, and what is right there. Its models hold "flux"."""

    def __init__(self, *arguments: Any, env: Mapping[str, str] | None = None, **settings: Any) -> None:
        self._faults = Faults(Path(tempfile.mkdtemp()))
        super().__init__(*arguments, **settings, env={**self._faults.environment, **(env or {})})
        self._graph = partial(flux_prompt, cp=self.cp)
        self._right: tuple[Any, float] | None = None

    def _ready(self) -> None:
        """Have workers that are there and warm; the first time, note what is right, and the device's memory."""
        latent, _ = self.measured(self._graph())
        self._right = self._right or (latent, used_device_memory())

    def _next_is_right(self) -> bool:
        assert self._right is not None
        return largest(self.measured(self._graph())[0], self._right[0]) <= LARGEST

    def strike(self, name: str, fault: Fault) -> None:
        """Report on a fault: what the prompt says, how soon, and the prompt after it."""
        with self.section.part(name):
            self._ready()
            self._faults.arm(1, fault.kind, module=2, times=fault.times)
            began = time.monotonic()
            result = self.run(self._graph(), timeout=TIMEOUT)
            seconds = time.monotonic() - began
            message = result.error.exception_message if result.error else f"the prompt ended: {result.status}"
            right, missing = self._next_is_right(), used_device_memory() - self._right[1]
            # A rehearsal may be one of several jobs on its machine.
            allowed = fault.seconds * self.section.limits * (SLACK if self.section.rehearse else 1)
            taken = not self._faults.waiting and result.status == ("error" if fault.words else "success")
            told = taken and all(word in message for word in fault.words)
            if not told:
                print(self.log_text()[-LOGGED:], flush=True)
            self.section.check(
                name, right and seconds <= allowed and told and missing <= BACK, seconds=seconds, allowed=allowed,
                next_prompt="right" if right else "wrong", missing_GB=missing, message=message.splitlines()[0],
            )  # fmt: skip
        self._faults.clear()

    def cancel(self) -> None:
        """Report on Cancel in blocks of a second each: the ranks leave at one of the next, and live on."""
        name = "Cancel inside a block of one second"
        with self.section.part(name):
            self._ready()
            pids = self.worker_pids()
            self._faults.arm(1, "slow", module=1, seconds=0.9)
            prompt = self.queue(self._graph(width=80))
            self.wait_event(lambda event: event.type == "executing" and event.data.get("node") == "sampler")
            time.sleep(1.3)
            began = time.monotonic()
            self.interrupt()
            result = self.wait(prompt, TIMEOUT)
            seconds = time.monotonic() - began
            kept = self.worker_pids() == pids
            good = result.status == "interrupted" and kept and self._next_is_right()
            self.section.check(name, good, seconds=seconds, workers_kept=kept)
