"""What CP Sampler reports about a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from comfy.patcher_extension import WrappersMP

from ..batch import tensors
from ..config import RuntimeConfig
from ..errors import MirrorError, UnsupportedError
from ..families import plan_for
from .patcher import ContextParallelPatcher, apply_to_model
from .recipe import recipe_of
from .session import SESSION, CallRecord

TIMER = "context_parallel_timer"


def run_with_report(
    model: Any, config: RuntimeConfig | None, steps: int, sample: Callable[[Any], Any]
) -> tuple[Any, dict[str, Any]]:
    """Apply `config` to `model` (or keep what it has), run `sample(model)`, return its result and the report."""
    if config is not None:
        model = apply_to_model(model, config)
    timer = CallTimer()
    if not isinstance(model, ContextParallelPatcher):
        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, TIMER, timer)
    SESSION.records.clear()
    began = time.monotonic()
    result = sample(model)
    ended = time.monotonic()
    if isinstance(model, ContextParallelPatcher) and not model.cp_local and SESSION.records:
        return result, _report(model, steps, ended - began, list(SESSION.records))
    timer.note(model, ended)
    return result, {
        "world_size": 1,
        "steps": steps,
        "calls": timer.calls,
        "seconds": round(ended - began, 4),
        "seconds_per_step": round((ended - began) / steps, 4),
        "seconds_per_call": _rounded(timer.seconds(ended)),
    }


class CallTimer:
    """Measures calls of a transformer in this process: a wrapper around each."""

    def __init__(self) -> None:
        self.calls = 0
        self.shape: tuple[int, ...] = ()
        self._second = 0.0

    def __call__(self, executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.shape = tuple(next(tensors(args[0])).shape)
        if self.calls == 2:
            self._second = time.monotonic()
        return executor(*args, **kwargs)

    def seconds(self, ended: float) -> float | None:
        """Per call, without the first one, which loads and warms up. None where there was no other.

        Args:
            ended: when the result was in host memory. A device may still compute when a call returns.
        """
        return (ended - self._second) / (self.calls - 1) if self.calls > 1 else None

    def note(self, model: Any, ended: float) -> None:
        """Keep the figure, to be compared with what several devices need."""
        seconds = self.seconds(ended)
        if seconds is not None and getattr(model, "cached_patcher_init", None) is not None:
            try:
                key = recipe_of(model).key
            except (MirrorError, UnsupportedError):  # a model that never runs on workers
                return
            SESSION.one_device[key, self.shape] = seconds


def communication_share(record: CallRecord) -> float:
    """Which part of a call rank 0 spent waiting for communication."""
    return record.reports[0]["communication"]["seconds"] / record.reports[0]["seconds"]


def time_by_rank(reports: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Where the time of a call went: seconds of compute, communication and wait of every rank; their sum is the same for all.

    A rank in a collective cannot tell a slow link from a late peer. The rank that waits least is the one that all others wait for:
    its time in collectives is counted as communication for every rank, and what others spend there beyond it as waiting, together
    with the time from the end of a rank's own work to that of the last one.
    """
    inside = [report["communication"]["seconds"] for report in reports]
    communication, total = min(inside), max(report["seconds"] for report in reports)
    return [
        {
            "compute": report["seconds"] - seconds,
            "communication": communication,
            "wait": (seconds - communication) + (total - report["seconds"]),
        }
        for report, seconds in zip(reports, inside, strict=True)
    ]


def _report(model: ContextParallelPatcher, steps: int, seconds: float, records: list[CallRecord]) -> dict[str, Any]:
    config = model.cp_config
    # The first call of a run may load or warm something up.
    steady = records[1:] or records
    first = [record.reports[0] for record in steady]
    reports = records[-1].reports
    degrees = reports[0]["degrees"]
    measured, predicted = [report["communication"] for report in first], [report["predicted"] for report in first]
    times = [time_by_rank(record.reports) for record in steady]
    per_call, one_device = _median(record.seconds for record in steady), SESSION.one_device.get(records[-1].kind)
    return {
        "world_size": config.world_size,
        "devices": list(config.devices),
        "degrees": degrees,
        "rotate_method": config.sequence.rotate_method if degrees["ring"] > 1 else None,
        "family": plan_for(model.model.diffusion_model).family,
        "steps": steps,
        "calls": len(records),
        "seconds": round(seconds, 4),
        "seconds_per_step": round(sum(record.seconds for record in records) / steps, 4),
        "seconds_per_call": _rounded(per_call),
        # Of the same model and shape, where CP Sampler ran them with one device since ComfyUI started.
        "seconds_per_call_on_one_device": _rounded(one_device),
        "speedup": None if one_device is None else round(one_device / per_call, 2),
        "communication_share": round(_median(communication_share(record) for record in steady), 4),
        # Of rank 0, per call. Predicted by the cost model, for attention alone.
        "communication": {
            "seconds": round(_median(m["seconds"] for m in measured), 6),
            "predicted_seconds": round(_median(p["seconds"] for p in predicted), 6),
            "bytes": round(_median(m["bytes"] for m in measured)),
            "predicted_bytes": round(_median(p["bytes"] for p in predicted)),
        },
        "ranks": [
            {
                "rank": rank,
                "pid": pid,
                "device": config.devices[rank],
                "tokens": report["tokens"],
                "seconds": {part: round(_median(time[rank][part] for time in times), 4) for part in times[0][rank]},
                "host_memory": report["memory"]["host"],
                "device_memory": report["memory"]["device"],
            }
            for rank, (pid, report) in enumerate(zip(SESSION.pool.pids if SESSION.pool else [], reports, strict=True))
        ],
    }


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
