"""The report of CP Sampler on a run; for people, as text, and as bars with each rank's times."""

from __future__ import annotations

import bisect
import contextlib
import json
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ...controller.run_stats import CallRecord, RunResult, RunStats
from ...errors import bad_value
from ...families import plan_for
from ...pool.config import RuntimeConfig
from ...version import VERSION
from ...words import ENGLISH, Words, words_in
from .apply import apply_to_model, check_type, timed
from .notes import notes_of
from .patcher import ContextParallelPatcher
from .runtime import CONTROLLER

WIDTH, MARGIN, LABEL = 640, 20, 150  # pixels: nodes show it a third smaller
BAR, GAP, LINE = 32, 12, 28
ROOM = WIDTH - 2 * MARGIN
TEXT, HEADLINE = 20, 28
BARS = 32  # ranks in the picture
DESCRIBED = 8  # ranks that get a line in the picture; the text has all
COLOURS = {"compute": "#3b82f6", "communication": "#f59e0b", "wait": "#9ca3af"}
PAPER, INK = "#1f2937", "#f9fafb"  # legible on a light page and on a dark one
INK_IN_BARS = "#111827"
LONGEST = 1 << 20  # characters of a report
WORD = re.compile(r"\s*(?:[\u3000-\u9fff\uff00-\uffef]|[^\s\u3000-\u9fff\uff00-\uffef]+)")
FONTS = ("NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "DroidSansFallbackFull.ttf", "msyh.ttc", "YuGothM.ttc", "PingFang.ttc")
"""Of Linux, Windows and macOS, with Chinese and Japanese; Pillow looks for them where the system keeps its own."""


def run_with_report(
    model: Any, config: RuntimeConfig | None, steps: int, sample: Callable[[Any], Any]
) -> tuple[Any, dict[str, Any]]:
    """Apply `config` to `model` (or keep its own), run `sample(model)`, return its result and the report."""
    check_type(model)
    if config is not None:
        model = apply_to_model(model, config)
    if not isinstance(model, ContextParallelPatcher):
        model = timed(model.clone())
    CONTROLLER.journal.run = RunStats(None)  # there may be no sampling
    began = time.monotonic()
    out = sample(model)
    seconds = time.monotonic() - began
    result = CONTROLLER.journal.result or RunResult()
    report = {
        "version": VERSION,
        "world_size": 1,
        "speed": result.words,
        "speed_parts": result.parts,  # for other languages
        "steps": steps,
        "calls": result.calls,
        "seconds": round(seconds, 4),
        # Both without the first call, which may include loading or warm-up, if there are more.
        "seconds_per_step": round((result.per_call * result.calls if result.per_call else seconds) / steps, 4),
        "seconds_per_call": _rounded(result.per_call),
    }
    if isinstance(model, ContextParallelPatcher) and not model.cp_local and result.last is not None:
        report |= _of_ranks(model, result, result.last)
    return out, report


def _of_ranks(model: ContextParallelPatcher, result: RunResult, last: CallRecord) -> dict[str, Any]:
    config, outcome, mean = model.cp_config, last.reports[0].outcome, result.mean
    return {
        "world_size": config.world_size,
        # Of the same model and sizes on one device: by world_size 1, by choice, or measured.
        "seconds_per_call_on_one_device": _rounded(result.on_one_device),
        "speedup": None if result.times is None else round(result.times, 2),
        "degrees": outcome.degrees,
        "at_work": last.at_work,
        # Of the last call: ranks at work, and the time of the best other number of ranks. None where all had to take part.
        "choice": None if last.choice is None else {**last.choice, "words": words_in(ENGLISH).choice(last.choice)},
        "shares": list(CONTROLLER.workers.pool.shares) if CONTROLLER.workers is not None else [],
        "family": plan_for(model.model.diffusion_model).family,
        "weights": _weights(model),
        "casts": last.casts,
        "on_all_tokens": last.on_all_tokens,
        "on_whole_batch": last.on_whole_batch,
        "controlnets": result.controlnets,
        "controlnets_on_one_device": result.controlnets_here,  # why
        "pipeline": _pipeline(config, result, last),
        # Of the last call: kinds of compiled blocks, uncompiled ones with reasons, and rank 0's compilations since its start.
        "compiled": {"kinds": outcome.compiled.kinds, "left": outcome.compiled.left, **outcome.compiled.counts},
        "communication_share": round(result.waiting_share, 4),
        # Means, so that they add up. Of rank 0, per call. Predicted by the cost model, for attention alone.
        "communication": {
            "seconds": round(mean["communication_seconds"], 6),
            "predicted_seconds": round(mean["predicted_seconds"], 6),
            "bytes": round(mean["communication_bytes"]),
            "predicted_bytes": round(mean["predicted_bytes"]),
            "sent_to_ranks": round(mean["sent_to_ranks"]),  # bytes of a call's arguments, by ComfyUI's process
        },
        "ranks": [
            {
                "rank": rank,
                "pid": pid,
                "device": config.devices[rank],
                "tokens": report.outcome.tokens,
                "seconds": {part: round(seconds, 4) for part, seconds in result.by_rank[rank].items()},
                "host_memory": report.memory.host,
                "device_memory": report.memory.device,
            }
            for rank, (pid, report) in enumerate(zip(last.pids, last.reports, strict=True))
        ],
    }


def _weights(model: ContextParallelPatcher) -> dict[str, Any] | None:
    """Return the placement of the weights; None after a loss of the ranks."""
    resident = CONTROLLER.resident(notes_of(model.model).key)
    if resident is None:
        return None
    return {
        "placement": resident.choice.placement,
        "reason": resident.choice.reason,
        "parts": resident.parts,  # of the words
        "device_bytes": resident.device_bytes,
    }


def _pipeline(config: RuntimeConfig, result: RunResult, last: CallRecord) -> dict[str, Any] | None:
    """Return the stages of the last call, and the number of exact calls in the run; None without stages."""
    staged = [report.outcome.staged for report in last.reports if report.outcome.staged is not None]
    if not staged:
        return None
    settings = config.staged
    return {
        "stages": settings.stages,
        "patches": settings.patches,
        "exact_calls": result.calls - result.patched,
        "approximate_calls": result.patched,
        "difference_from_exact": result.difference,  # of the call that Measure repeated
        "bubble": round(settings.bubble(staged[0].runs), 4),
        "bytes_sent": [report.bytes.get("send", 0) for report in last.reports],
        "stage_of_rank": [each.stage for each in staged],
        "kept_bytes": [each.kept for each in staged],
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def shown(text: str, words: Words) -> tuple[str, Tensor]:
    """Return the summary and the picture of a report of CP Sampler. Raises ConfigError for anything else."""
    try:
        if len(text) > LONGEST:
            raise ValueError
        report = json.loads(text)
        return "\n".join(summarise(report, words)), draw(report, words)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        raise bad_value("report", text, "the JSON report of a CP Sampler", "Connect its report output.") from None


def summarise(report: dict[str, Any], words: Words) -> list[str]:
    """Summarise a report in a few lines, and a line per rank at the end if there are ranks."""
    say, per_call = words.say, report["seconds_per_call"]
    seconds = say("report.per_step", time=_seconds(report["seconds_per_step"]))
    if per_call is not None:
        seconds += f", {say('per_call', time=_seconds(per_call))}"
    if report["world_size"] == 1:
        return [say("report.one_device"), seconds]
    alone = report["seconds_per_call_on_one_device"]
    if alone is not None:
        seconds += say("report.alone", time=_seconds(alone))
    ranks = f"{say('ranks', count=report['world_size'])} ({words.mesh(report['degrees'], report['at_work'])})"
    lines = [
        words.speed(report["speed_parts"]),
        *([say("report.how_to_measure")] if alone is None else []),
        seconds,
        say("report.on", family=report["family"], ranks=ranks),
        *([words.held(report["weights"]["parts"])] if report["weights"] else []),
        *(
            say(f"report.{name}", nodes=", ".join(nodes))
            for name in ("on_all_tokens", "on_whole_batch")
            if (nodes := report.get(name))
        ),
        *([say("report.casts")] if report.get("casts") else []),
        *([say("report.controlnets", count=report["controlnets"])] if report.get("controlnets") else []),
        *([say(f"report.controlnets_here.{why[0]}", what=why[1])] if (why := report.get("controlnets_on_one_device")) else []),
        *([say("report.some", some=words.choice(report["choice"]))] if report["choice"] else []),
        say("report.waiting", share=f"{report['communication_share']:.0%}"),
    ]
    if per_call is not None:
        outside = per_call - max(sum(rank["seconds"].values()) for rank in report["ranks"])
        lines.append(say("report.outside", time=f"{max(0.0, outside):.2g} s"))
    for rank in report["ranks"]:
        tokens = ", ".join(f"{count} {name}" for name, count in rank["tokens"].items())
        facts = [say("report.tokens", tokens=tokens)] if tokens else []
        facts.append(say("memory.host", size=_gib(rank["host_memory"])))
        if rank["device_memory"]:
            facts.append(say("memory.device", size=_gib(rank["device_memory"])))
        lines.append(say("report.rank", rank=rank["rank"], device=rank["device"], facts=", ".join(facts)))
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def draw(report: dict[str, Any], words: Words) -> Tensor:
    """Draw the summary, and a bar per rank. Returns `[1, H, W, 3]` in 0..1, as ComfyUI's images are."""
    font, large = _font(TEXT, words.language), _font(HEADLINE, words.language)
    if font is None or large is None:
        return draw(report, words_in(ENGLISH))
    lines, ranks = [line.replace("×", "x") for line in summarise(report, words)], report.get("ranks", [])  # Pillow's font has no ×
    if len(ranks) > DESCRIBED:
        lines = lines[: len(lines) - len(ranks)]
    if len(ranks) > BARS:
        lines.append(words.say("report.first", count=BARS, all=len(ranks)))
        ranks = ranks[:BARS]
    headline = [(part, large, HEADLINE + GAP) for part in _wrap(lines[0], large)]
    rows = headline + [(part, font, LINE) for line in lines[1:] for part in _wrap(line, font)]
    bars = len(ranks) * (BAR + GAP) + LINE + 2 * GAP if ranks else 0
    height = 2 * MARGIN + sum(step for _, _, step in rows) + bars
    picture = Image.new("RGB", (WIDTH, height), PAPER)
    pen = ImageDraw.Draw(picture)
    y = MARGIN
    for text, used, step in rows:
        pen.text((MARGIN, y), text, INK, used)
        y += step
    if ranks:
        y += GAP
        scale = (WIDTH - 2 * MARGIN - LABEL) / max(sum(rank["seconds"].values()) or 1.0 for rank in ranks)
        for rank in ranks:
            pen.text((MARGIN, y + 4), _fit(f"rank {rank['rank']}  {rank['device']}", font, LABEL - GAP), INK, font)
            x = float(MARGIN + LABEL)
            for part, colour in COLOURS.items():
                end = x + rank["seconds"][part] * scale
                if end - x >= 1:
                    pen.rectangle((x, y, end, y + BAR), colour)
                    text = f"{rank['seconds'][part]:.3g} s"
                    left_over = end - x - font.getlength(text)
                    if left_over >= 8:
                        pen.text((x + left_over / 2, y + 4), text, INK_IN_BARS, font)
                x = end
            y += BAR + GAP
        x = float(MARGIN + LABEL)
        for part, colour in COLOURS.items():
            pen.rectangle((x, y + 4, x + 18, y + 22), colour)
            name = words.say(f"report.{part}")
            pen.text((x + 26, y), name, INK, font)
            x += 48 + font.getlength(name)
    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255)[None]


def _font(size: int, language: str) -> Any:
    """Return a font with the characters of a language; None where the system has none."""
    if language == ENGLISH:
        return ImageFont.load_default(size)
    for name in FONTS:
        with contextlib.suppress(OSError):
            return ImageFont.truetype(name, size)
    return None


def _wrap(text: str, font: Any) -> list[str]:
    """Split a text into lines that fit: between words, and between Chinese or Japanese characters."""
    lines = [""]
    for word in WORD.findall(text):
        longer = lines[-1] + word
        if lines[-1] and font.getlength(longer) > ROOM:
            lines.append(word.strip())
        else:
            lines[-1] = longer
    return [_fit(line, font, ROOM) for line in lines]


def _fit(text: str, font: Any, width: int) -> str:
    """Return the text, cut at the end if it is too long."""
    if len(text) <= width and font.getlength(text) <= width:
        return text
    # A character is at least a pixel wide.
    longest = bisect.bisect_right(range(width), width, key=lambda count: int(font.getlength(f"{text[:count]}...")))
    return f"{text[: longest - 1]}..."


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
