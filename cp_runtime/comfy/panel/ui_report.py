"""The report of CP Sampler on a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ...controller.choosing import in_words
from ...controller.placement import HELD
from ...controller.run_stats import UNITS, CallRecord, RunStats
from ...families import plan_for
from ...pool.config import RuntimeConfig
from ...version import VERSION
from ..forward.ui_apply import apply_to_model, check_type, timed
from ..forward.ui_patcher import ContextParallelPatcher
from ..model.ui_target import notes_of
from ..ranks.ui import CONTROLLER


def run_with_report(
    model: Any, config: RuntimeConfig | None, steps: int, sample: Callable[[Any], Any]
) -> tuple[Any, dict[str, Any]]:
    """Apply `config` to `model` (or keep what it has), run `sample(model)`, return its result and the report."""
    journal = CONTROLLER.journal
    check_type(model)
    if config is not None:
        model = apply_to_model(model, config)
    if not isinstance(model, ContextParallelPatcher):
        model = timed(model.clone())
    journal.run = RunStats(None)  # there may be nothing to sample
    began = time.monotonic()
    result = sample(model)
    ended = time.monotonic()
    run, speed = journal.run, journal.speed
    per_call = run.per_call
    report = {
        "version": VERSION,
        "world_size": 1,
        "speed": None if speed is None else speed.words,
        "steps": steps,
        "calls": run.calls,
        "seconds": round(ended - began, 4),
        # Both without the first call, which may load or warm something up, if there are more.
        "seconds_per_step": round((ended - began if per_call is None else per_call * run.calls) / steps, 4),
        "seconds_per_call": _rounded(per_call),
    }
    if isinstance(model, ContextParallelPatcher) and not model.cp_local and run.last is not None and speed is not None:
        report |= {
            # Of the same model and sizes, where they ran on one device: by world_size 1, by choice, or to be measured.
            "seconds_per_call_on_one_device": _rounded(speed.on_one_device),
            "speedup": None if speed.times is None else round(speed.times, 2),
            **_of_ranks(model, run, run.last),
        }
    return result, report


def axes(degrees: Mapping[str, float], at_work: float | None) -> str:
    """Put the mesh of a call into words. `degrees`: a rank's, by axis. `at_work`: ranks that shared the call; None = not known."""
    named = " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    return named or ("one at work" if at_work in (None, 1) else f"{at_work} at work")


def _of_ranks(model: ContextParallelPatcher, run: RunStats, last: CallRecord) -> dict[str, Any]:
    config, outcome = model.cp_config, last.reports[0].outcome
    degrees, compiled = outcome.degrees, outcome.compiled
    mean = {name: total / run.count for name, total in run.rank_0.items()}
    return {
        "world_size": config.world_size,
        "devices": list(config.devices),
        "degrees": degrees,
        "at_work": last.at_work,
        # Of the last call: ranks at work, and what the other number of ranks would take. None where all had to take part.
        "choice": None if last.choice is None else {**last.choice, "words": in_words(last.choice)},
        "shares": list(CONTROLLER.workers.pool.shares) if CONTROLLER.workers is not None else [],
        # Of a result from that on one device, in standard deviations, root mean square; None where it was not measured.
        "exchange": {"mode": config.sequence.exchange, "difference_from_one_device": run.difference},
        "rotate_method": config.sequence.rotate_method if degrees["ring"] > 1 else None,
        "family": plan_for(model.model.diffusion_model).family,
        "weights": _weights(model, last),
        "pipeline": _pipeline(model.cp_config, run, last),
        # Of the last call: kinds of compiled blocks, those that are not and why, and what rank 0 has compiled since it started.
        "compiled": {"kinds": compiled.kinds, "left": compiled.left, **compiled.counts},
        "communication_share": round(run.waiting_share, 4),
        # Means, so that they add up. Of rank 0, per call. Predicted by the cost model, for attention alone.
        "communication": {
            "seconds": round(mean["communication_seconds"], 6),
            "predicted_seconds": round(mean["predicted_seconds"], 6),
            "bytes": round(mean["communication_bytes"]),
            "predicted_bytes": round(mean["predicted_bytes"]),
        },
        "ranks": [
            {
                "rank": rank,
                "pid": pid,
                "device": config.devices[rank],
                "tokens": report.outcome.tokens,
                "seconds": {part: round(total / run.count, 4) for part, total in run.times[rank].items()},
                "host_memory": report.memory.host,
                "device_memory": report.memory.device,
            }
            for rank, (pid, report) in enumerate(zip(last.pids, last.reports, strict=True))
        ],
    }


def _weights(model: ContextParallelPatcher, last: CallRecord) -> dict[str, Any] | None:
    """Return where the ranks keep the weights; None where the ranks have been lost since."""
    resident = CONTROLLER.resident(notes_of(model.model).key)
    if resident is None:
        return None
    return {
        "placement": resident.choice.placement,
        "reason": resident.choice.reason,
        "words": HELD[resident.parts["case"]].format(**{**resident.parts, "unit": UNITS[resident.parts["unit"]]}),
        "device_bytes": resident.device_bytes,
        "bytes_sent": last.reports[0].bytes.get("weights", 0),  # in a call; part of the bytes of communication
    }


def _pipeline(config: RuntimeConfig, run: RunStats, last: CallRecord) -> dict[str, Any] | None:
    """Return how the last call passed through stages, and how many calls of the run were exact; None where there are none."""
    staged = [report.outcome.staged for report in last.reports if report.outcome.staged is not None]
    if not staged:
        return None
    settings = config.staged
    return {
        "stages": settings.stages,
        "patches": settings.patches,
        "warmup_calls": settings.warmup_calls,
        "exact_calls": run.done + (run.done < run.calls) - run.patched,
        "approximate_calls": run.patched,
        "difference_from_exact": run.difference,  # of the call that Measure looked at
        "bubble": round(settings.bubble(staged[0].runs), 4),
        "bytes_sent": [report.bytes.get("send", 0) for report in last.reports],
        "stage_of_rank": [each.stage for each in staged],
        "kept_bytes": [each.kept for each in staged],
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
