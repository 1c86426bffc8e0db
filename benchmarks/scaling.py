"""Write docs/generated/scaling.md and its plots: the gain of several devices, predicted, and the model against published runs.

    python benchmarks/scaling.py

Nothing is run: it takes a second and needs no GPU.
"""

from __future__ import annotations

from math import log2
from pathlib import Path

from published import BOUND, TABLES, errors, lacks, replay

from cp_runtime.engine.scaling import LINKS, MODELS, Forecast, Model, best, operations, work_of

ROOT = Path(__file__).resolve().parents[1]
DEVICES = (2, 4, 8, 16, 64)
SHOWN = ("nvlink", "pcie5", "pcie4", "pcie3x8", "100gbit", "25gbit")
COLOURS = {
    "nvlink": "#2563eb",
    "pcie5": "#059669",
    "pcie4": "#d97706",
    "pcie3x8": "#dc2626",
    "100gbit": "#7c3aed",
    "25gbit": "#6b7280",
}
WIDTH, HEIGHT, LEFT, TOP = 340, 300, 46, 34  # pixels of one plot, and where its axes begin

TEXT = """# Scaling, predicted

**Everything on this page is predicted by the cost model, nothing is measured**, but for the column *published*. It is written by
`python benchmarks/scaling.py`. For your own model, size and link:

    python -m cp_runtime.engine.scaling --model wan14b --tokens 75600 --devices 4 --link pcie4

in a clone, with `--seconds` for what a step takes on one of your devices. The formula is in
[`cp_runtime/engine/policy.py`](../../cp_runtime/engine/policy.py) and [`cost.py`](../../cp_runtime/engine/cost.py); it is the
one by which CP Config chooses, with the speeds that the ranks measure when they start in place of those that are assumed here.

## Times as fast as one device

![Predicted speed-up over the number of devices, one plot per model](../images/scaling.svg)

The fastest split of at most that many devices, its mode behind it: where one device is fastest, 1.00. Assumed: bandwidth that one
device sends while all do, and operations per second of one device.

Below each model stand published runs of it, by other programs: how many times as fast as one device they were, and in brackets what
the model says for that very run. Where both are more than {bound:.0%} apart, the last column says what the model lacks: it lacks
that in the predictions above, too.

"""

AFTER = """
What it does not know: kernels that are launched one by one (small pictures on fast GPUs), text encoders and VAEs, links that are
shared with other devices, machines whose devices are not alike, a fast axis inside of a machine and a slow one between machines:
all that ranks of several machines send to each other counts as sent between machines. A device holds the whole model, or its part
of the weights arrives in time.

## The model against the world

What others published, and what the model says: one row of each table, the first, fits the operations per second of the device,
the link comes from the machine's name, and the other rows must follow. A row whose error is above {bound:.0%} says what the model
lacks. `tests/unit/test_scaling.py` holds this. Times are in the units of the sources: seconds of a run or a step, or milliseconds.

| Table | Source | Devices | CFG x ring x ulysses | Published | Predicted | Error | What the model lacks |
|---|---|---|---|---|---|---|---|
"""


def describe(found: Forecast) -> str:
    return f"{found.speedup:.2f}<br>{found.mode}"


def table() -> str:
    lines = []
    for model in MODELS.values():
        work = work_of(model)
        lines += [f"### {model.name}", "", f"{model.tokens} tokens. Seconds of a step on one device stand behind its link.", ""]
        lines += ["| Link | " + " | ".join(map(str, DEVICES)) + " |", "|---" * (len(DEVICES) + 1) + "|"]
        for name in SHOWN:
            link = LINKS[name]
            alone = operations(work) / link.flops
            cells = [describe(best(work, devices, link, alone)) for devices in DEVICES]
            lines.append(f"| {link.name}, {alone:.3g} s | {' | '.join(cells)} |")
        lines += ["", *published_runs(model)]
    lines += ["| Link | GB/s | Latency, µs | Operations per second |", "|---|---|---|---|"]
    for name in SHOWN:
        link = LINKS[name]
        between = "" if link.between is None else f"; {link.between / 1e9:.3g} between machines"
        lines.append(f"| {link.name} | {link.bandwidth / 1e9:.3g}{between} | {link.latency * 1e6:.0f} | {link.flops:.1e} |")
    return "\n".join(lines) + "\n"


def published_runs(model: Model) -> list[str]:
    """What others measured of that model, against one device of theirs, over the same numbers of devices."""
    lines = []
    for each in TABLES:
        alone = each.rows[0]
        if each.model.name != model.name or alone.devices != 1:
            continue
        cells, missing = [], ""
        for devices in DEVICES:
            found = [one for one in replay(each) if one.row.devices == devices]
            if found:
                row = min(found, key=lambda one: one.row.time)
                cells.append(f"{alone.time / row.row.time:.2f} ({alone.time / row.predicted:.2f})")
                missing = lacks(each, row.error) or missing
            else:
                cells.append("")
        lines.append(f"| {each.name} | {each.link.name} | {' | '.join(cells)} | {missing} |")
    if not lines:
        return ["No run of it on several devices was found.", ""]
    head = ["| Published run | Link, as it counts here | " + " | ".join(map(str, DEVICES)) + " | What the model lacks |"]
    return [*head, "|---" * (len(DEVICES) + 3) + "|", *lines, ""]


def world() -> str:
    lines, summary = [], ["", "| Table | Median error | Worst | What the model lacks |", "|---|---|---|---|"]
    for each in TABLES:
        first = each.rows[0]
        split = f"{first.batch} x {first.ring} x {first.ulysses}"
        lines.append(f"| {each.name} | {each.source} | {first.devices} | {split} | {first.time:g} | fitted | | |")
        for found in replay(each):
            row = found.row
            split = f"{row.batch} x {row.ring} x {row.ulysses}"
            compared = f"{row.time:g} | {found.predicted:.3g} | {found.error:+.1%} | {lacks(each, found.error)}"
            lines.append(f"| | | {row.devices} | {split} | {compared} |")
        middle, worst = errors(each)
        summary.append(f"| {each.name} | {middle:.1%} | {worst:.1%} | {each.missing} |")
    return "\n".join([*lines, *summary]) + "\n"


def plot() -> str:
    """All models as SVG: speed-up over devices, both by powers of two."""
    parts = []
    for index, model in enumerate(MODELS.values()):
        x0, y0 = (index % 2) * WIDTH, (index // 2) * HEIGHT
        inner_w, inner_h = WIDTH - LEFT - 18, HEIGHT - TOP - 40

        def at(devices: int, speedup: float, x0: int = x0, y0: int = y0, w: int = inner_w, h: int = inner_h) -> tuple[float, float]:
            return x0 + LEFT + DEVICES.index(devices) / (len(DEVICES) - 1) * w, y0 + TOP + h * (1 - log2(speedup) / 6)

        parts.append(f'<text x="{x0 + LEFT}" y="{y0 + 20}" font-weight="bold">{model.name} (predicted)</text>')
        for power in range(7):
            y = y0 + TOP + inner_h * (1 - power / 6)
            parts.append(f'<line x1="{x0 + LEFT}" x2="{x0 + LEFT + inner_w}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
            parts.append(f'<text x="{x0 + LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{2**power} x</text>')
        for devices in DEVICES:
            x, _ = at(devices, 1.0)
            parts.append(f'<text x="{x:.1f}" y="{y0 + TOP + inner_h + 18}" text-anchor="middle">{devices}</text>')
        work = work_of(model)
        for name in SHOWN:
            link = LINKS[name]
            found = [best(work, devices, link, operations(work) / link.flops).speedup for devices in DEVICES]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(d, s) for d, s in zip(DEVICES, found, strict=True)))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
    rows = -(-len(MODELS) // 2)
    for place, name in enumerate(SHOWN):
        x, y = 12 + (place % 3) * 226, rows * HEIGHT + 16 + (place // 3) * 20
        parts.append(f'<rect x="{x}" y="{y - 9}" width="14" height="4" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y - 3}">{LINKS[name].name}</text>')
    width, height = 2 * WIDTH, rows * HEIGHT + 50
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    (ROOT / "docs" / "images" / "scaling.svg").write_text(plot())
    page = TEXT.format(bound=BOUND) + table() + AFTER.format(bound=BOUND) + world()
    (ROOT / "docs" / "generated" / "scaling.md").write_text(page)
    print("wrote docs/generated/scaling.md and docs/images/scaling.svg")


if __name__ == "__main__":
    main()
