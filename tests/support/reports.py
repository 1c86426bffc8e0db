"""What ranks report, for tests without ranks."""

from typing import Any

from cp_runtime.pool.messages import CallOutcome, CallReport, Communication, Failure, Memory


def call_report(
    seconds: float = 1.0, communication: float = 0.0, sent: int = 0, modules: int = 1, nbytes: int = 0, **outcome: Any
) -> CallReport:
    """Of a call.

    Args:
        communication: seconds of it.
        outcome: fields of `CallOutcome`.
    """
    done = CallOutcome(**{"degrees": {}, "at_work": 1, "room": None, **outcome})
    return CallReport(
        nbytes=nbytes, outcome=done, seconds=seconds, modules=modules,
        communication=Communication(seconds=communication, collectives=1, bytes=sent), bytes={}, memory=Memory(host=1, device=0),
    )  # fmt: skip


def failure(kind: str = "RuntimeError", message: str = "went wrong", at: float = 0.0, trace: str = "", **more: Any) -> Failure:
    """Of an error."""
    return Failure(at=at, kind=kind, message=message, trace=trace, **more)
