"""What CP Sampler reports about a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ...families import plan_for
from ...pool.config import RuntimeConfig
from .controller import CONTROLLER, CallRecord
from .patcher import ContextParallelPatcher, apply_to_model, begin_run
from .timing import RunTimer, recipe_key, time_calls


def run_with_report(
    model: Any, config: RuntimeConfig | None, steps: int, sample: Callable[[Any], Any]
) -> tuple[Any, dict[str, Any]]:
    """Apply `config` to `model` (or keep what it has), run `sample(model)`, return its result and the report."""
    if config is not None:
        model = apply_to_model(model, config)
    if not isinstance(model, ContextParallelPatcher):
        model = model.clone()
        time_calls(model, begin_run)
        CONTROLLER.unload(recipe_key(model) or "")  # else the weights of a run before may fill the device that is measured
    begin_run(RunTimer(None))  # there may be nothing to sample
    began = time.monotonic()
    result = sample(model)
    ended = time.monotonic()
    run = CONTROLLER.run
    per_call = run.per_call(ended)
    report = {
        "world_size": 1,
        "steps": steps,
        "calls": run.calls,
        "seconds": round(ended - began, 4),
        # Both without the first call, which may load or warm something up, if there are more.
        "seconds_per_step": round((ended - began if per_call is None else per_call * run.calls) / steps, 4),
        "seconds_per_call": _rounded(per_call),
    }
    records = [record for record in list(CONTROLLER.records) if record.ended >= began]
    if isinstance(model, ContextParallelPatcher) and not model.cp_local and records:
        one_device = CONTROLLER.one_device.get(run.kind)
        report |= {
            # Of the same model and sizes, where CP Sampler ran them on one device since ComfyUI started.
            "seconds_per_call_on_one_device": _rounded(one_device),
            "speedup": None if one_device is None or per_call is None else round(one_device / per_call, 2),
            **_of_ranks(model, records),
        }
    elif run.kind is not None and per_call is not None:
        CONTROLLER.one_device[run.kind] = per_call
    return result, report


def axes(degrees: Mapping[str, int]) -> str:
    """The mesh of a call in words, from a rank's degrees by axis."""
    return " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one at work"


def communication_share(records: Sequence[CallRecord]) -> float:
    """Which part of these calls rank 0 spent waiting for communication."""
    reports = [record.reports[0] for record in records]
    return sum(report["communication"]["seconds"] for report in reports) / sum(report["seconds"] for report in reports)


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


def _of_ranks(model: ContextParallelPatcher, records: list[CallRecord]) -> dict[str, Any]:
    config = model.cp_config
    steady = records[1:] or records
    first = [record.reports[0] for record in steady]
    last = records[-1]
    degrees = last.reports[0]["degrees"]
    measured, predicted = [report["communication"] for report in first], [report["predicted"] for report in first]
    times = [time_by_rank(record.reports) for record in steady]
    return {
        "world_size": config.world_size,
        "devices": list(config.devices),
        "degrees": degrees,
        "rotate_method": config.sequence.rotate_method if degrees["ring"] > 1 else None,
        "family": plan_for(model.model.diffusion_model).family,
        "communication_share": round(communication_share(steady), 4),
        # Means, so that they add up. Of rank 0, per call. Predicted by the cost model, for attention alone.
        "communication": {
            "seconds": round(fmean(m["seconds"] for m in measured), 6),
            "predicted_seconds": round(fmean(p["seconds"] for p in predicted), 6),
            "bytes": round(fmean(m["bytes"] for m in measured)),
            "predicted_bytes": round(fmean(p["bytes"] for p in predicted)),
        },
        "ranks": [
            {
                "rank": rank,
                "pid": pid,
                "device": config.devices[rank],
                "tokens": report["tokens"],
                "seconds": {part: round(fmean(time[rank][part] for time in times), 4) for part in times[0][rank]},
                "host_memory": report["memory"]["host"],
                "device_memory": report["memory"]["device"],
            }
            for rank, (pid, report) in enumerate(zip(last.pids, last.reports, strict=True))
        ],
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
