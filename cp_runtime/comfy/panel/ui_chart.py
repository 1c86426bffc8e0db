"""A report of CP Sampler for people: as text, and as bars that show where each rank spent its time."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ...controller.run_stats import NOT_MEASURED, times_in_words
from ...errors import ContextParallelError, bad_value
from ...pool.config import MAX_RANKS
from .ui_report import axes

WIDTH, MARGIN, LABEL = 640, 20, 150  # pixels: nodes show it a third smaller
BAR, GAP, LINE = 32, 12, 28
ROOM = WIDTH - 2 * MARGIN
TEXT, HEADLINE = 20, 28
BARS = 32  # ranks that are drawn
DESCRIBED = 8  # ranks that get a line in the picture; the text has all
COLOURS = {"compute": "#3b82f6", "communication": "#f59e0b", "wait": "#9ca3af"}
PAPER, INK = "#1f2937", "#f9fafb"  # to be read on a light page and on a dark one
INK_IN_BARS = "#111827"
LONGEST = 1 << 20  # characters of a report
LONGEST_NAME = 100  # characters
LONGEST_WORDS = 300  # characters
LARGEST = 1e18  # of any figure
HOW_TO_MEASURE = "To compare with one device, press Measure in the panel Context Parallel, or run once with world_size 1."


def read_report(text: str) -> dict[str, Any]:
    """Parse a report of CP Sampler and return the part that is shown. Raises ConfigError: it is no report. Any workflow may put any
    text here."""
    error: ContextParallelError = bad_value("report", text, "the JSON report of a CP Sampler", "Connect its report output.")
    if len(text) > LONGEST:
        raise error
    try:
        report = json.loads(text)
        return _checked(report, _ONE_DEVICE | _SEVERAL if report["world_size"] != 1 else _ONE_DEVICE)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise error from None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST:
        raise ValueError(value)
    return value


def _name(value: Any, longest: int = LONGEST_NAME) -> str:
    if not isinstance(value, str) or len(value) > longest or not value.isprintable():
        raise ValueError(value)
    return value


def _or_none(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _counts(value: Any) -> dict[str, float]:
    if len(value) > LONGEST_NAME:
        raise ValueError(value)
    return {_name(name): _number(count) for name, count in value.items()}


def _ranks(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_RANKS:
        raise ValueError(value)
    return [_checked(rank, _RANK) for rank in value]


_NUMBER_OR_NONE = _or_none(_number)
_ONE_DEVICE = {
    "speed": _or_none(lambda words: _name(words, LONGEST_WORDS)), "world_size": _number, "seconds_per_step": _number,
    "seconds_per_call": _NUMBER_OR_NONE,
}  # fmt: skip
_SEVERAL = {
    "family": _name,
    "degrees": _counts,
    "at_work": _NUMBER_OR_NONE,
    "seconds_per_call_on_one_device": _NUMBER_OR_NONE,
    "speedup": _NUMBER_OR_NONE,
    "communication_share": _number,
    "ranks": _ranks,
    # Empty where there was no choice, and in reports from before there was one.
    "choice": lambda choice: "" if choice is None else _name(choice["words"]),
}
_NEWER = {"choice", "speed", "at_work"}  # than the first reports
_RANK = {
    "rank": _number, "device": _name, "tokens": _counts, "host_memory": _number, "device_memory": _number,
    "seconds": lambda value: {part: _number(value[part]) for part in COLOURS},
}  # fmt: skip


def _checked(value: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: check(value.get(name) if name in _NEWER else value[name]) for name, check in fields.items()}


def summarise(report: dict[str, Any]) -> list[str]:
    """Summarise what `read_report` returned in a few lines, and a line per rank at the end if there are ranks."""
    seconds = f"{report['seconds_per_step']:.3g} s per step"
    if report["seconds_per_call"] is not None:
        seconds += f", {report['seconds_per_call']:.3g} s per call"
    if report["world_size"] == 1:
        return ["one device", seconds]
    alone = report["seconds_per_call_on_one_device"]
    if alone is not None:
        seconds += f" (one device: {alone:.3g} s)"
    lines = [
        report["speed"] or _older_speed(report),
        *([HOW_TO_MEASURE] if alone is None else []),
        seconds,
        f"{report['family']} on {report['world_size']} ranks ({axes(report['degrees'], report['at_work'])})",
        *([f"this call ran on {report['choice']}"] if report["choice"] else []),
        f"{report['communication_share']:.0%} of a call waiting for other devices and for the link",
    ]
    if report["seconds_per_call"] is not None:
        outside = report["seconds_per_call"] - max(sum(rank["seconds"].values()) for rank in report["ranks"])
        lines.append(f"{max(0.0, outside):.2g} s of a call in ComfyUI, outside of the ranks")
    for rank in report["ranks"]:
        tokens = ", ".join(f"{count} {name}" for name, count in rank["tokens"].items())
        memory = f"host {_gib(rank['host_memory'])}" + (f", device {_gib(rank['device_memory'])}" if rank["device_memory"] else "")
        lines.append(f"rank {rank['rank']} on {rank['device']}: {f'tokens {tokens}; ' if tokens else ''}{memory}")
    return lines


def _older_speed(report: dict[str, Any]) -> str:
    """Return the speed of an old report, which had no text for it."""
    return NOT_MEASURED if report["speedup"] is None else times_in_words(report["speedup"], report["world_size"])


def draw(report: dict[str, Any]) -> Tensor:
    """Draw the summary, and a bar per rank. Returns `[1, H, W, 3]` in 0..1, as ComfyUI's images are."""
    lines, ranks = [line.replace("×", "x") for line in summarise(report)], report.get("ranks", [])  # the font has no ×
    if len(ranks) > DESCRIBED:
        lines = lines[: len(lines) - len(ranks)]
    if len(ranks) > BARS:
        lines.append(f"the first {BARS} ranks of {len(ranks)}:")
        ranks = ranks[:BARS]
    font, large = ImageFont.load_default(TEXT), ImageFont.load_default(HEADLINE)
    headline = _wrap(lines[0], large)
    lines = [part for line in lines[1:] for part in _wrap(line, font)]
    bars = len(ranks) * (BAR + GAP) + LINE + 2 * GAP if ranks else 0
    height = 2 * MARGIN + len(headline) * (HEADLINE + GAP) + len(lines) * LINE + bars
    picture = Image.new("RGB", (WIDTH, height), PAPER)
    pen = ImageDraw.Draw(picture)
    y = MARGIN
    for line in headline:
        pen.text((MARGIN, y), line, INK, large)
        y += HEADLINE + GAP
    for line in lines:
        pen.text((MARGIN, y), line, INK, font)
        y += LINE
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
                    _inside(pen, font, x, end, y, f"{rank['seconds'][part]:.3g} s")
                x = end
            y += BAR + GAP
        x = float(MARGIN + LABEL)
        for part, colour in COLOURS.items():
            pen.rectangle((x, y + 4, x + 18, y + 22), colour)
            pen.text((x + 26, y), part, INK, font)
            x += 48 + font.getlength(part)
    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255)[None]


def _inside(pen: ImageDraw.ImageDraw, font: Any, left: float, right: float, top: int, text: str) -> None:
    width = font.getlength(text)
    if width + 8 <= right - left:
        pen.text(((left + right - width) / 2, top + 4), text, INK_IN_BARS, font)


def _wrap(text: str, font: Any) -> list[str]:
    """Split a text between words into lines that fit."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > ROOM:
            lines.append(word)
        else:
            lines[-1] = longer
    return [_fit(line, font, ROOM) for line in lines]


def _fit(text: str, font: Any, width: int) -> str:
    """Return the text, cut at the end if there is no room for all of it."""
    if len(text) <= width and font.getlength(text) <= width:
        return text
    # A character is at least a pixel wide.
    longest = bisect.bisect_right(range(width), width, key=lambda count: int(font.getlength(f"{text[:count]}...")))
    return f"{text[: longest - 1]}..."


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
