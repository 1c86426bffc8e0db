"""Write docs/generated/scaling.md and its plots: the gain of several devices, predicted, and the model against published runs.

    python benchmarks/scaling.py

Nothing is run: it takes a second and needs no GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2, prod
from pathlib import Path
from statistics import median
from typing import NamedTuple

from common import ROOT
from forecast import HOSTS, LINKS, MODELS, Forecast, Model, best, operations, ranks_on, work_of
from prediction import Way, predict

DEVICES = (2, 4, 8, 16, 64)
IN_TABLES = DEVICES[:3]
SHOWN = {
    "nvlink": "#2563eb", "pcie5": "#059669", "pcie4": "#d97706", "bridge": "#0891b2", "pcie3x8": "#dc2626",
    "100gbit": "#7c3aed", "25gbit": "#6b7280",
}  # fmt: skip
"""Links, and their colours."""
WIDTH, HEIGHT, LEFT, TOP = 340, 300, 46, 34  # pixels of one plot, and where its axes begin

BOUND = 0.15  # of the median of a run; a time beyond it says what the model lacks
ONLY_PUBLISHED = {
    "hunyuan": Model("HunyuanVideo, 720p, 129 frames", 13e9, 60, 24, 128, 118800 + 256, single=40),
    "step": Model("StepVideo 30B", 30e9, 48, 48, 128, 75888),
}

TEXT = """# Scaling, predicted

**The cost model predicts everything here; only published figures were measured, by others.** `python benchmarks/scaling.py` writes
this page. For another model, size or link, in a clone (`--seconds` gives the time of a step on one of your devices):

    python benchmarks/forecast.py --model wan14b --tokens 75600 --devices 4 --link pcie4

The formula is `benchmarks/prediction.py` over [`cost.py`](../../cp_runtime/engine/cost.py), by which CP Config chooses degrees. The
number of ranks is measured, not predicted.

## Times as fast as one device

![Predicted speed-up over the number of devices, one plot per model](../images/scaling.svg)

Each cell has the speed-up and its split: C groups for CFG, U Ulysses, R ring; over networks the plot goes on to 64 devices. Beside
each link: seconds of a step on one device. Assumptions:

{links}

The host needs {host:.2g} ms to launch a layer's kernels in eager mode, as beside an H200 ([gpu.md](../gpu.md)), and
{compiled:.2g} ms for compiled blocks (`forecast.py --compiled`): no step is faster.

Not modelled: text encoders and VAEs, unequal devices, and one sequence over a fast axis inside machines and a slow one between
them. A device has room for the model, or its part of the weights arrives in time.

"""

AFTER = """## The model against published runs

The first time of each run fits the operations per second of its device; the link follows from the machine's name
(`benchmarks/published.json`), and the other times must follow. Each entry has the split, published/predicted time in the source's
unit, and the error: **bold** above {bound:.0%}, with a note. The time of the host was fitted to xDiT's two runs of Flux on H100.

| Run | Source | Times | Median, worst error |
|---|---|---|---|
"""


class Split(NamedTuple):
    """Degrees of a published run."""

    batch: int
    ring: int
    ulysses: int


class Replay(NamedTuple):
    """A split, what it took, and what the model says, in the unit of the run."""

    split: Split
    time: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative, positive where the model is too slow."""
        return self.predicted / self.time - 1

    def __str__(self) -> str:
        error = f"{self.error:+.1%}"
        return f"{self.time:g}/{float(f'{self.predicted:.3g}'):g} {f'**{error}**' if abs(self.error) > BOUND else error}"


@dataclass(frozen=True)
class Published:
    """Times of one model on one machine, as somebody else measured them. The first fits the speed of the device.

    Args:
        times: "batch (CFG) x ring x ulysses, and what it took", with commas between them.
        calls, milliseconds: how many calls of the model a time stands for, and its unit, in place of seconds.
        rotate_method: how the ring of that implementation works.
        host: which of HOSTS launches the kernels; "" = it keeps up with the devices.
        lacks: what the model does not know of, where it is off by more than BOUND: in a few words, a colon, and in a sentence.
        tokens, items: of a batch, where they are not the usual ones of the model; `note` says why.
    """

    name: str
    source: str
    model: str
    link: str
    times: str
    calls: int = 1
    milliseconds: bool = False
    rotate_method: str = "alltoall"
    host: str = ""
    lacks: str = ""
    tokens: int | None = None
    items: int | None = None
    note: str = ""

    @property
    def rows(self) -> list[tuple[Split, float]]:
        """Every split, and what it took."""
        return [(Split(*map(int, text.split("x"))), float(time)) for text, time in (each.split() for each in self.times.split(","))]

    def predicted(self, split: Split, flops: float) -> float:
        """Return what a split takes on devices of that speed, in the unit of the times."""
        model = {**MODELS, **ONLY_PUBLISHED}[self.model]
        work, count = work_of(replace(model, items=self.items or model.items), self.tokens), prod(split)
        settings = {"ring_degree": split.ring, "ulysses_degree": split.ulysses, "ulysses_rounds": 1}
        ranks = ranks_on(count, LINKS[self.link], flops, rotate_method=self.rotate_method, **settings)
        alone = operations(work) / flops
        seconds = predict(work, ranks, Way(count, split.batch), alone)
        if self.host:
            seconds = max(seconds, HOSTS[self.host].step(MODELS[self.model], split.ring))
        return seconds * self.calls * (1e3 if self.milliseconds else 1)

    @cached_property
    def replay(self) -> list[Replay]:
        """Every row but the first, predicted from the first."""
        ((first, time), *others), low, high = self.rows, 1e9, 1e18
        for _ in range(100):  # halving the interval finds the operations per second with which the model gives the first row
            flops = (low * high) ** 0.5
            low, high = (flops, high) if self.predicted(first, flops) > time else (low, flops)
        return [Replay(split, time, self.predicted(split, high)) for split, time in others]

    def errors(self) -> tuple[float, float]:
        """Return (median, worst) of the errors, without their signs."""
        found = [abs(each.error) for each in self.replay]
        return median(found), max(found)


PUBLISHED = [Published(**each) for each in json.loads(Path(__file__).with_name("published.json").read_text())]


def links() -> str:
    lines = ["| Link | GB/s | Measured by others | Latency, µs | Operations per second |", "|---|---|---|---|---|"]
    for name in SHOWN:
        link = LINKS[name]
        between = "" if link.between is None else f"; {link.between / 1e9:.3g} between machines"
        lines.append(
            f"| {link.name} | {link.bandwidth / 1e9:.3g}{between} | {link.source} | {link.latency * 1e6:.0f} | {link.flops:.1e} |"
        )
    return "\n".join(lines)


def split_of(found: Forecast) -> Split:
    return Split(found.way.groups, found.ring, found.ulysses)


def short(split: Split) -> str:
    """A split in short, as C2·U4·R2; empty for one device."""
    degrees = {"C": split.batch, "U": split.ulysses, "R": split.ring}
    return "·".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)


def table() -> str:
    lines = []
    for model in MODELS.values():
        work = work_of(model)
        lines += [f"### {model.name}, {model.tokens} tokens", ""]
        lines += [f"| Link, step | {' | '.join(map(str, IN_TABLES))} |", f"{'|---' * (len(IN_TABLES) + 1)}|"]
        for link in (LINKS[name] for name in SHOWN):
            if link.between is not None:  # so few devices are in one machine
                continue
            alone = operations(work) / link.flops
            fastest = [best(model, devices, link, alone) for devices in IN_TABLES if devices <= link.most]
            cells = [f"{found.speedup:.2f} {short(split_of(found))}".rstrip() for found in fastest]
            cells += [""] * (len(IN_TABLES) - len(cells))
            lines.append(f"| {link.name.partition(' (')[0]}, {alone:.3g} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines) + "\n"


def world() -> str:
    lines, notes = [], {}
    for each in PUBLISHED:
        first, time = each.rows[0]
        times = [f"{short(first) or '1'} {time:g}", *(f"{short(one.split)} {one}" for one in each.replay)]
        middle, worst = each.errors()
        note = f" [{notes.setdefault(each.lacks, len(notes) + 1)}]" if each.lacks else ""
        lines.append(f"| {each.name}{note} | {each.source} | {', '.join(times)} | {middle:.1%}, {worst:.1%} |")
    return "\n".join([*lines, "", *(f"- [{number}] lacks {missing}" for missing, number in notes.items())]) + "\n"


def plot() -> str:
    """All models as SVG: speed-up over devices, both by powers of two."""
    parts, width, height = [], WIDTH - LEFT - 18, HEIGHT - TOP - 40  # of the axes

    def at(devices: int, speedup: float) -> tuple[float, float]:
        return LEFT + DEVICES.index(devices) / (len(DEVICES) - 1) * width, TOP + height * (1 - log2(speedup) / 6)

    for index, model in enumerate(MODELS.values()):
        parts.append(f'<g transform="translate({index % 2 * WIDTH},{index // 2 * HEIGHT})">')
        parts.append(f'<text x="{LEFT}" y="20" font-weight="bold">{model.name} (predicted)</text>')
        for power in range(7):
            _, y = at(DEVICES[0], 2**power)
            parts.append(f'<line x1="{LEFT}" x2="{LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{2**power} x</text>')
        for devices in DEVICES:
            x, y = at(devices, 1.0)
            parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{devices}</text>')
        work = work_of(model)
        for name, colour in SHOWN.items():
            alone = operations(work) / LINKS[name].flops
            reached = [devices for devices in DEVICES if devices <= LINKS[name].most]
            points = " ".join("{:.1f},{:.1f}".format(*at(n, best(model, n, LINKS[name], alone).speedup)) for n in reached)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append("</g>")
    bottom = -(-len(MODELS) // 2) * HEIGHT
    for place, (name, colour) in enumerate(SHOWN.items()):
        x, y = 12 + (place % 3) * 226, bottom + 16 + (place // 3) * 20
        parts.append(f'<rect x="{x}" y="{y - 9}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{y - 3}">{LINKS[name].name}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {bottom + 70}" font-family="sans-serif" font-size="11">'
        f'<rect width="{2 * WIDTH}" height="{bottom + 70}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    (ROOT / "docs" / "images" / "scaling.svg").write_text(plot())
    page = (
        TEXT.format(bound=BOUND, links=links(), host=1e3 * HOSTS["ComfyUI"].layer, compiled=1e3 * HOSTS["compiled"].layer)
        + table()
        + AFTER.format(bound=BOUND)
        + world()
    )
    (ROOT / "docs" / "generated" / "scaling.md").write_text(page)
    print("wrote docs/generated/scaling.md and docs/images/scaling.svg")


if __name__ == "__main__":
    main()
