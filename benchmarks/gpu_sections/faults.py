"""Faults of ranks on a real server: what the prompt says, how soon, and whether the next prompt is right.

On a GPU with real ones: memory that is not there, an assertion in a kernel, a kernel that does not end.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from support import checkpoints
from support.faults import SLACK, Faults
from support.graphs import flux_prompt
from support.server import ComfyServer
from torch import Tensor

from .options import Options
from .results import NEEDS_CARD, Results
from .server import TIMEOUT, largest, sample, start, used_device_memory

LARGEST = 2e-4
STEP_TIMEOUT = 8.0
RANKS = 2
BACK = 0.3  # GB; what may be missing of the device's memory afterwards


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of rank 1.

    Args:
        kind: as in `pool/faults.py`.
        seconds: from the queue to the end of the prompt, at most.
        words: in its message; without any, the prompt succeeds.
        times: calls in a row that have it.
        card: whether it takes one that is there.
    """

    kind: str
    seconds: float
    words: tuple[str, ...]
    times: int = 1
    card: bool = False


FAULTS = {
    "SIGKILL in a call": Fault(kind="kill", seconds=5, words=("rank 1", "SIGKILL")),
    "an error on one rank": Fault(kind="error", seconds=5, words=("rank 1", "injected")),
    "a hang": Fault(kind="sleep", seconds=STEP_TIMEOUT + 5, words=("rank 1", "within")),
    # Room is made, and the call tried once more.
    "out of device memory, until room is made": Fault(kind="device memory", seconds=10, words=()),
    "out of device memory": Fault(kind="device memory", seconds=10, words=("rank 1", "OutOfMemory"), times=2),
    "an assertion in a kernel": Fault(kind="device assert", seconds=10, words=("rank 1", "CUDA error"), card=True),
    "a kernel that does not end": Fault(kind="device hang", seconds=STEP_TIMEOUT + 10, words=("rank 1",), card=True),
}


def run(options: Options, results: Results) -> None:
    """A result per fault."""
    with tempfile.TemporaryDirectory() as folder:
        models, faults = Path(folder) / "models", Faults(Path(folder) / "faults")
        faults.folder.mkdir()
        checkpoints.write("flux", models)
        with start(options, models, "--fp32-unet", env=faults.environment) as server:
            expected, _ = sample(server, flux_prompt(cp=_config(options)))
            held = used_device_memory()
            for name, fault in list(FAULTS.items())[: 1 if options.few else None]:
                if fault.card and options.rehearse:
                    results.add(name, NEEDS_CARD)
                    continue
                with results.part(name):
                    _strike(name, fault, server, faults, options, expected, held, results)
                faults.clear()
            if not options.few:
                with results.part("Cancel inside a block of one second"):
                    _cancel(server, faults, options, expected, results)


def _config(options: Options) -> dict[str, object]:
    return {"devices": options.devices(RANKS), "backend": "gloo", "step_timeout": STEP_TIMEOUT}


def _strike(
    name: str, fault: Fault, server: ComfyServer, faults: Faults, options: Options, expected: Tensor, held: float, results: Results
) -> None:
    sample(server, flux_prompt(cp=_config(options)))  # workers that are there and warm
    faults.arm(1, fault.kind, module=2, times=fault.times)
    began = time.monotonic()
    result = server.run(flux_prompt(cp=_config(options)), timeout=TIMEOUT)
    seconds = time.monotonic() - began
    message = result.error.exception_message if result.error else f"the prompt ended: {result.status}"
    out, _ = sample(server, flux_prompt(cp=_config(options)))
    right, missing = largest(out, expected) <= LARGEST, used_device_memory() - held
    allowed = fault.seconds * (SLACK if options.rehearse else 1)  # a rehearsal may be one of several jobs on its machine
    taken = not faults.waiting and result.status == ("error" if fault.words else "success")
    told = taken and all(word in message for word in fault.words)
    good = right and seconds <= allowed and told and missing <= BACK
    results.check(
        name, good, seconds=seconds, allowed=allowed, next_prompt="right" if right else "wrong", missing_GB=missing,
        message=message.splitlines()[0],
    )  # fmt: skip


def _cancel(server: ComfyServer, faults: Faults, options: Options, expected: Tensor, results: Results) -> None:
    """Blocks of a second each: the ranks leave at one of the next, and live on."""
    sample(server, flux_prompt(cp=_config(options)))
    pids = server.worker_pids()
    faults.arm(1, "slow", module=1, seconds=0.9)
    prompt = server.queue(flux_prompt(cp=_config(options), width=80))
    server.wait_event(lambda event: event.type == "executing" and event.data.get("node") == "sampler")
    time.sleep(1.3)
    began = time.monotonic()
    server.interrupt()
    result = server.wait(prompt, TIMEOUT)
    seconds = time.monotonic() - began
    kept = server.worker_pids() == pids
    out, _ = sample(server, flux_prompt(cp=_config(options)))
    right = largest(out, expected) <= LARGEST
    results.check(
        "Cancel inside a block of one second", result.status == "interrupted" and kept and right, seconds=seconds, workers_kept=kept
    )
