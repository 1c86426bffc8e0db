"""What CP Sampler reports about a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from ..config import RuntimeConfig
from ..families import plan_for
from .patcher import ContextParallelPatcher, apply_to_model
from .session import SESSION, CallRecord


def run_with_report(
    model: Any, config: RuntimeConfig | None, steps: int, sample: Callable[[Any], Any]
) -> tuple[Any, dict[str, Any]]:
    """Apply `config` to `model` (or keep what it has), run `sample(model)`, return its result and the report."""
    if config is not None:
        model = apply_to_model(model, config)
    SESSION.records.clear()
    began = time.monotonic()
    result = sample(model)
    seconds = time.monotonic() - began
    if not isinstance(model, ContextParallelPatcher) or model.cp_local or not SESSION.records:
        return result, {
            "world_size": 1,
            "steps": steps,
            "seconds": round(seconds, 4),
            "seconds_per_step": round(seconds / steps, 4),
        }
    return result, _report(model, steps, seconds, list(SESSION.records))


def _report(model: ContextParallelPatcher, steps: int, seconds: float, records: list[CallRecord]) -> dict[str, Any]:
    config = model.cp_config
    # The first call of a run may load or warm something up.
    steady = [record.reports[0] for record in records[1:] or records]
    reports = records[-1].reports
    degrees = reports[0]["degrees"]
    measured, predicted = [report["communication"] for report in steady], [report["predicted"] for report in steady]
    return {
        "world_size": config.world_size,
        "devices": list(config.devices),
        "degrees": degrees,
        "rotate_method": config.sequence.rotate_method if degrees["ring"] > 1 else None,
        "family": plan_for(model.model.diffusion_model).family,
        "steps": steps,
        "calls": len(records),
        "seconds": round(seconds, 4),
        "seconds_per_step": round(sum(r.seconds for r in records) / steps, 4),
        "seconds_per_call": round(statistics.median(r.seconds for r in records[1:] or records), 4),
        "communication_share": round(statistics.median(r["communication"]["seconds"] / r["seconds"] for r in steady), 4),
        # Of rank 0, per call. Predicted by the cost model, for attention alone.
        "communication": {
            "seconds": round(statistics.median(m["seconds"] for m in measured), 6),
            "predicted_seconds": round(statistics.median(p["seconds"] for p in predicted), 6),
            "bytes": round(statistics.median(m["bytes"] for m in measured)),
            "predicted_bytes": round(statistics.median(p["bytes"] for p in predicted)),
        },
        "ranks": [
            {
                "rank": rank,
                "pid": pid,
                "device": config.devices[rank],
                "tokens": report["tokens"],
                "host_memory": report["memory"]["host"],
                "device_memory": report["memory"]["device"],
            }
            for rank, (pid, report) in enumerate(zip(SESSION.pool.pids if SESSION.pool else [], reports, strict=True))
        ],
    }
