"""Texts for users about failures in a pool."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from ..errors import (
    MAX_SHOWN,
    MirrorError,
    PlanError,
    PoolError,
    PoolTimeout,
    RankError,
    RankOutOfMemory,
    UnsentError,
    UnsupportedError,
)
from ..system import system
from .config import RuntimeConfig
from .launcher import LogPump
from .messages import Failure, Report
from .peers import shm_advice
from .processes import RankProcess
from .progress import SILENT, Progress
from .settings import label_of, with_labels

_FOR_USERS = (MirrorError.__name__, UnsupportedError.__name__, UnsentError.__name__)  # their messages need no trace
_OUT_OF_MEMORY = torch.OutOfMemoryError.__name__
_COMMUNICATION = ("DistBackendError", "DistNetworkError", "DistStoreError")  # of torch.distributed
_ACCELERATOR = "AcceleratorError"  # of torch 2.8 and later, for any error of a device
_NO_MEMORY = re.compile("out of memory|failed to cuda calloc", re.IGNORECASE)  # the second is NCCL's, for a buffer of a group
_DEVICE_FULL = re.compile(r"(CUDA|XPU|NPU)( error:)? out of memory")  # torch before 2.8, and torch_npu: with RuntimeError
_SLOW = {
    "start": "If the machine is only slow, raise the environment variable CP_STARTUP_TIMEOUT.",
    "connecting": "If it is only slow, raise the environment variable CP_CONNECT_TIMEOUT.",
    "load": "If loading is only slow, raise the environment variable CP_LOAD_TIMEOUT.",
    "call": f"If the step is only slow, raise {label_of('step_timeout')}.",
}
_NCCL = "NCCL was tried with NCCL_P2P_DISABLE=1, too."
_TO_AUTO = f"Set {label_of('backend')} to auto, with which the ranks go on over gloo."
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS")  # a rank that finds /dev/shm full gets the last
_EXCLUSIVE = (
    "The GPU may take one process only, which another one is, or ComfyUI: look at its compute mode (nvidia-smi -q -d COMPUTE), and "
    "where that is Exclusive_Process, set it to Default (nvidia-smi -c DEFAULT, as root)."
)


def connect_advice(config: RuntimeConfig) -> str:
    """Return advice for ranks that do not connect, beyond what the error itself says."""
    if config.backend in ("auto", "gloo"):
        return ""
    return f"{_NCCL} {_TO_AUTO} {shm_advice(config.world_size)}".rstrip() if config.backend == "nccl" else _TO_AUTO


def connect_failure(error: PoolError) -> str:
    """Return in short why the ranks did not connect, where another way may work; empty where it would not help."""
    if isinstance(error, PoolTimeout):
        return "no answer in time"
    if isinstance(error, RankOutOfMemory):
        return ""
    if isinstance(error, RankError) and (error.kind in _CRASHES or _of_communication(error.kind, error.message)):
        return f"{error.kind}: {error.message.partition(chr(10))[0][:MAX_SHOWN]}"
    return ""


def reported_failure(rank: int, pid: int, failure: Failure, replies: Mapping[int, Report], advice: str = "") -> RankError:
    """Return the error for a rank that reported a failure; with the advice if the ranks' communication failed."""
    kind, message, trace = failure.kind, failure.message, failure.trace
    if kind == PlanError.__name__:  # the engine names settings as its Python callers do
        message = with_labels(message)
    communication = _of_communication(kind, message)
    full = _NO_MEMORY.search(message) if communication or kind == _ACCELERATOR else _DEVICE_FULL.match(message)
    if kind == _OUT_OF_MEMORY or full:
        message += _describe_memory(replies)
        return RankOutOfMemory(rank=rank, pid=pid, kind=kind, message=message, trace=trace)
    if advice and communication:
        message = _followed(message, advice)
    if "busy or unavailable" in message:
        message = _followed(message, _EXCLUSIVE)
    return RankError(rank=rank, pid=pid, kind=kind, message=message, trace="" if kind in _FOR_USERS else trace)


def _followed(message: str, advice: str) -> str:
    """Return another program's message, ended as a sentence, and advice."""
    return f"{message}{'' if message.endswith(('.', '!', '?')) else '.'} {advice}"


def _of_communication(kind: str, message: str) -> bool:
    """Return whether an error is one of torch.distributed; that of NCCL is a RuntimeError since torch 2.15."""
    return kind in _COMMUNICATION or (kind == RuntimeError.__name__ and "NCCL" in message)


def death(
    ranks: Iterable[int], noticed: int, processes: Sequence[RankProcess] | Mapping[int, RankProcess], advice: str = ""
) -> RankError:
    """Return the error for ranks that died: it names the one whose death caused the others', by default the one whose death was
    noticed first. No other signal must have been sent to them.

    The kernel closes the connections of a killed process one by one, and a busy machine takes its time in between: another rank may
    miss its peer, and exit, before the killed one's own channel closes. Nobody is killed by a signal because a peer ended.
    """
    for each in (noticed, *ranks):
        processes[each].wait(1)  # its channel closes a moment before it ends
    rank = next((rank for rank in (noticed, *ranks) if system.name_of_exit(processes[rank].returncode or 0)), noticed)
    process = processes[rank]
    if process.error is not None:
        return RankError(rank=rank, pid=process.pid, kind=type(process.error).__name__, message=str(process.error))
    kind, message = _describe_exit(process.returncode)
    message += f" The workers are restarted on next use. {advice}".rstrip()
    if lines := process.log.finish():
        message += "\n\nWhat it wrote last:\n" + "\n".join(lines)
    return RankError(rank=rank, pid=process.pid, kind=kind, message=message)


def missed_deadline(
    what: str, timeout: float, late: Mapping[int, Progress], processes: Sequence[RankProcess], advice: str
) -> PoolTimeout:
    """Return the error for ranks that did not report. It names the rank that the others wait for, with its stack. The pool is to be
    killed.

    Args:
        what: the command.
        late: where the ranks are that did not report.
        advice: what may help besides more time.
    """
    now = time.monotonic()
    pids = {rank: f"pid {pid}" if (pid := processes[rank].pid) else "not started yet" for rank in late}
    names = {rank: f"rank {rank} ({pids[rank]})" for rank in late}
    silent = {rank: now - at.beat for rank, at in late.items() if at.beat and now - at.beat > SILENT}
    last = min(late, key=lambda rank: (rank not in silent, late[rank].at.modules, late[rank].at.collectives))
    details = ", ".join(
        f"{names[rank]} at module {at.at.modules}, collective {at.at.collectives}"
        + (f", without a sign of life for {silent[rank]:.0f} s" if rank in silent else "")
        for rank, at in late.items()
    )
    text = f"{what} timed out after {timeout:g} s; {names[last]} is furthest behind. No report from {details}."
    state = processes[last].state  # before it is killed
    stack = wait_for_stack([processes[rank].log for rank in late], processes[last].log)
    found = f"Its main thread, whose process is {state}:\n{stack}\n" if stack else f"Its process is {state} and wrote no stack. "
    remedy = f"{_SLOW.get(what, _SLOW['load'])} {advice}".rstrip()
    return PoolTimeout(f"{text} {found}The ranks are restarted on next use. {remedy}", last)


STACK_TIMEOUT = 0.6  # seconds that ranks get to write their stacks, which they do when the time is up
SHOWN_FRAMES = 12  # of a stack that an error shows, the innermost; the log has all
STACK_QUIET = 0.15  # seconds without another line after which all is written


def wait_for_stack(logs: Sequence[LogPump], last: LogPump) -> str:
    """Wait until ranks have written their stacks; return that of the main thread of one of them, empty where it wrote none."""
    now = time.monotonic()
    deadline, quiet_since, before = now + STACK_TIMEOUT, now, [0] * len(logs)
    while now < deadline and not (all(before) and now - quiet_since >= STACK_QUIET):
        time.sleep(0.03)
        counts, now = [len(each.stacks) for each in logs], time.monotonic()
        if counts != before:
            before, quiet_since = counts, now
    begins = [at for at, line in enumerate(last.stacks) if "most recent call first" in line]
    first = max(begins, default=0)  # the main thread is the last
    return "\n".join(last.stacks[first + 1 :][:SHOWN_FRAMES])


def _describe_memory(replies: Mapping[int, Report]) -> str:
    """Return a line for each rank that reported its memory, under a heading; empty where none did."""
    lines = []
    for rank, reply in sorted(replies.items()):
        memory = getattr(reply, "memory", None)
        if memory is not None:
            used = (f"{name} {nbytes / 2**30:.2f} GiB" for name, nbytes in vars(memory).items() if nbytes is not None)
            lines.append(f"rank {rank}: {', '.join(used)}")
    return "\nMemory (host: resident; device: peak):\n" + "\n".join(lines) if lines else ""


def _describe_exit(code: int | None) -> tuple[str, str]:
    """Return (kind, message) for an exit code."""
    if code is None:
        return "ProcessGone", "the process closed its channel and did not end."
    if name := system.name_of_exit(code):
        hint = " The kernel may have killed it for lack of memory." if name == "SIGKILL" else ""
        return name, f"the process ended with {name}.{hint}"
    return "ProcessExit", f"the process exited with code {code}."
