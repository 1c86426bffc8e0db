"""A report of CP Sampler for people: as text, and as bars of where each rank's time went."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..errors import bad_value

WIDTH, MARGIN, LABEL = 960, 24, 190  # pixels
BAR, GAP, LINE = 30, 12, 30
COLOURS = {"compute": "#3b82f6", "communication": "#f59e0b", "wait": "#9ca3af"}
PAPER, INK = "#ffffff", "#111827"
WHERE_FROM = "Connect the report output of CP Sampler."


def read_report(text: str) -> dict[str, Any]:
    """The report that CP Sampler gave out as JSON. Raises ConfigError where it is something else."""
    try:
        report = json.loads(text)
    except ValueError:
        report = None
    if not isinstance(report, dict) or not {"world_size", "steps", "seconds_per_step"} <= report.keys():
        raise bad_value("report", text, "the JSON report of a CP Sampler", WHERE_FROM)
    return report


def summarise(report: dict[str, Any]) -> list[str]:
    """The report in a few lines; a line per rank at the end, where there are ranks."""
    ranks = report.get("ranks", [])
    if not ranks:
        return ["one device", f"{report['seconds_per_step']:.3g} s per step"]
    axes = ", ".join(f"{name} {degree}" for name, degree in report["degrees"].items() if degree > 1)
    lines = [
        f"{report['family']} on {report['world_size']} ranks ({axes})",
        f"{report['seconds_per_step']:.3g} s per step, {report['seconds_per_call']:.3g} s per call, "
        f"{report['communication_share']:.0%} of it waiting for communication",
    ]
    if report["speedup"] is not None:
        alone = report["seconds_per_call_on_one_device"]
        lines.append(f"one device: {alone:.3g} s per call, so {report['speedup']:.2f} times as fast with all")
    for rank in ranks:
        tokens = ", ".join(f"{count} {name}" for name, count in rank["tokens"].items())
        memory = f"host {_gib(rank['host_memory'])}" + (f", device {_gib(rank['device_memory'])}" if rank["device_memory"] else "")
        lines.append(f"rank {rank['rank']} on {rank['device']}: {f'tokens {tokens}; ' if tokens else ''}{memory}")
    return lines


def draw(report: dict[str, Any]) -> Tensor:
    """The summary, and a bar per rank. Returns `[1, H, W, 3]` in 0..1, as ComfyUI's images are."""
    lines, ranks = summarise(report), report.get("ranks", [])
    # Where one line more than ranks cannot be read any more, the bars are enough.
    lines = lines[: max(3, len(lines) - len(ranks))] if len(ranks) > 8 else lines
    height = 2 * MARGIN + len(lines) * LINE + (len(ranks) * (BAR + GAP) + LINE + 2 * GAP if ranks else 0)
    picture = Image.new("RGB", (WIDTH, height), PAPER)
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(18)
    y = MARGIN
    for line in lines:
        pen.text((MARGIN, y), _fit(line, pen, font), INK, font)
        y += LINE
    if ranks:
        y += GAP
        scale = (WIDTH - 2 * MARGIN - LABEL) / max(sum(rank["seconds"].values()) or 1.0 for rank in ranks)
        for rank in ranks:
            pen.text((MARGIN, y + 4), _fit(f"rank {rank['rank']}  {rank['device']}", pen, font, LABEL - GAP), INK, font)
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
            pen.text((x + 26, y + 2), part, INK, font)
            x += 60 + pen.textlength(part, font)
    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255)[None]


def _inside(pen: ImageDraw.ImageDraw, font: Any, left: float, right: float, top: int, text: str) -> None:
    width = pen.textlength(text, font)
    if width + 8 <= right - left:
        pen.text(((left + right - width) / 2, top + 4), text, INK, font)


def _fit(text: str, pen: ImageDraw.ImageDraw, font: Any, width: int = WIDTH - 2 * MARGIN) -> str:
    """The text, or as much of its beginning as there is room for."""
    if pen.textlength(text, font) <= width:
        return text
    while text and pen.textlength(f"{text}...", font) > width:
        text = text[:-1]
    return f"{text}..."


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
