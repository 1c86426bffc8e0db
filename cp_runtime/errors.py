"""The errors that the extension raises on purpose.

All of them derive from `ContextParallelError`. A message names the problem, the actual and the allowed values, and the remedy. For
a setting the remedy comes first, as ComfyUI cuts messages off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MAX_SHOWN = 200  # characters of a value in an error
MAX_REMEDY = 100  # characters of an error that ComfyUI's message is sure to show

ON_ONE_DEVICE = "set “if a call cannot be split” of CP Config to 'single device'"
"""What to do about any refusal, with the label that the node shows."""


class ContextParallelError(RuntimeError):
    """Base of all errors of this package."""


class ConfigError(ContextParallelError, ValueError):
    """A setting is out of range or contradicts another one. Raised before any process starts."""


class PlanError(ContextParallelError, ValueError):
    """A plan does not fit the module it was applied to, or a tensor does not fit the plan."""


class UnknownStreamError(PlanError):
    """A plan names a stream that no argument has defined in this call yet."""


class UnsupportedError(ContextParallelError):
    """The model, or something another node attached to it, cannot run sharded. `remedy`: of this case, the end of the message."""

    def __init__(self, problem: str = "", remedy: str = "") -> None:
        self.remedy = remedy
        super().__init__(f"{problem} {remedy}".rstrip())

    def or_else(self, remedy: str) -> str:
        """Return the message with another remedy."""
        return f"{self} Or {remedy[0].lower()}{remedy[1:]}" if self.remedy else f"{self} {remedy}"


class UnsentError(UnsupportedError):
    """A value of ComfyUI's process cannot be sent to the ranks, and is needed there."""


class PatchInterrupt(ContextParallelError):
    """Code of another node has interrupted the prompt, on a rank."""


class PatchError(UnsupportedError):
    """Code of another node, which no table lists, has raised something on a rank."""


class CompileError(ContextParallelError):
    """The compiler cannot compile a block of the model, of the class `block`. `cause`: the compiler's message, one line."""

    def __init__(self, block: str, backend: str, cause: str) -> None:
        self.block = block
        super().__init__(
            f"torch.compile (backend {backend}) cannot compile {block}: {cause} Remove Torch Compile from the graph, or "
            f"{ON_ONE_DEVICE}: such blocks then run as they are."
        )


class MirrorError(ContextParallelError):
    """The model on the workers is not, or cannot be made, the model of the UI process."""


class ChangedFileError(MirrorError):
    """A file with weights of a model was written to after a worker had mapped it."""


class ProtocolError(ContextParallelError):
    """A message of the pool is malformed, too large or out of order."""


class PoolError(ContextParallelError):
    """A command of the worker pool failed."""


class PoolTimeout(PoolError):
    """The workers did not answer within their deadline. `rank`: the one that the others wait for; None = unknown."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)


class RankError(PoolError):
    """A worker rank failed: the first one, if several did.

    Args:
        kind: name of the exception type on that rank, or of the signal that ended it.
        trace: its traceback, empty where the process died without one.
    """

    def __init__(self, *, rank: int, pid: int, kind: str, message: str, trace: str = "") -> None:
        self.rank, self.pid, self.kind, self.message, self.trace = rank, pid, kind, message, trace
        text = f"rank {rank} (pid {pid}) failed: {kind}: {message}"
        super().__init__(f"{text}\n\nTraceback of rank {rank}:\n{trace}" if trace else text)


class RankOutOfMemory(RankError, torch.OutOfMemoryError):
    """A rank's device is out of memory. ComfyUI, too, recognises it as an error of its device, and unloads its models."""


def bad_value(field: str, got: object, allowed: str, remedy: str) -> ConfigError:
    """Build the error for a setting. The remedy comes first, and with the field has at most MAX_REMEDY characters."""
    return ConfigError(f"{field}: {remedy} Got {shown(got)}; allowed: {allowed}.")


def check_choice(name: str, value: object, options: Sequence[str]) -> None:
    if value not in options:
        remedy = "Choose one of them." if len(options) == 2 else "Leave it at auto unless you know better."
        raise bad_value(name, value, ", ".join(options), remedy)


def check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise bad_value(name, value, "True or False", "Set it to one of them.")


def is_int(value: object) -> bool:
    """Return whether a value is an int, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Return a value as errors show it, cut off if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
