"""What is approximate costs in pictures: how many digits of a page can still be read, and how far it is from the exact one.

    python benchmarks/digits/quality.py [--pages 16] [--columns 1 2 3 4] [--results FOLDER] [--write]

Real ranks behind a real server draw the same pages in every way. Legible: digits that `reader.py` reads as what was asked for, of
64 per page, with Wilson's 95 % interval. PSNR: against the pages of one rank with the same steps and CFG. `--results` keeps figures
and first pages, and goes on from there. `--write` puts the table into docs/numerics.md and some pages into the help and the README.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import torch
from PIL import Image, ImageDraw, ImageFont
from support.server import CUSTOM_NODES, ComfyServer

from digits import graphs, page, reader

COLUMNS = ((20, 1.0), (20, 4.0), (8, 1.0), (8, 4.0))  # steps, CFG
TWO: dict[str, Any] = {"world_size": 2, "batch_degree": 1, "ranks_per_call": "all"}
EIGHT = {"exchange": "8 bit"}
ROWS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks, Ulysses": {"cp": {**TWO, "ulysses_degree": 2}},
    "two ranks, ring": {"cp": {**TWO, "ring_degree": 2}},
    **{
        f"{patches} patches, {warmup} warm-up": {
            "cp": {"world_size": 2},
            "pipefusion": {"stages": 2, "patches": patches, "warmup_calls": warmup},
        }
        for patches in (2, 8)
        for warmup in (1, 4)
    },
    "exchange in 8 bits, Ulysses": {"cp": {**TWO, **EIGHT, "ulysses_degree": 2}},
    "exchange in 8 bits, ring": {"cp": {**TWO, **EIGHT, "ring_degree": 2}},
    "weights in fp8, one rank": {"weight_dtype": "fp8_e4m3fn"},
}
DOCUMENT = common.ROOT / "docs" / "numerics.md"
START, END = "<!-- digits: written by benchmarks/digits/quality.py -->", "<!-- /digits -->"
SHOWN = COLUMNS[1]
PICTURES = {
    "web/docs/images/patches.jpg": {
        "one rank": "exact",
        "2 patches, 1 warm-up": "2 patches",
        "8 patches, 1 warm-up": "8 patches",
    },
    "docs/images/digits.jpg": {"one rank": "one rank", "two ranks, Ulysses": "two ranks"},
}
BAND = 64  # pixels of a page that the picture shows, two rows
MOST_PSNR = 60.0  # dB; more is rounding of the picture to 8 bits


def prompts(pages: int) -> list[str]:
    """Texts in which every digit is asked for equally often, as nearly as the number of pages allows."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([torch.randperm(10, generator=generator) for _ in range(pages)])[: 8 * pages]
    return ["".join(map(str, line)) for line in drawn.view(pages, 8).tolist()]


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a part."""
    z, part = 1.96, right / count
    middle, half = part + z * z / (2 * count), z * math.sqrt(part * (1 - part) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)


def psnr(pictures: torch.Tensor, exact: torch.Tensor) -> float:
    """Decibels, of pictures [B, 256, 256] with values from 0 to 1."""
    return min(MOST_PSNR, -10 * math.log10(max((pictures - exact).pow(2).mean().item(), 1e-12)))


def measure(count: int, columns: list[int], folder: Path) -> dict[str, Any]:
    """Figures by "row, steps, CFG": digits that are legible, digits, dB, and the seconds that it took. The folder keeps them."""
    kept = folder / "figures.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    texts = prompts(count)
    rows = torch.stack([page.classes(text) for text in texts])
    with common.models() as models:
        graphs.put_weights(models)
        arguments: dict[str, Any] = {"args": ["--use-pytorch-cross-attention"], "env": {"OMP_NUM_THREADS": "1"}}
        with ComfyServer(common.comfyui(), models=models, custom_nodes=CUSTOM_NODES | graphs.NODES, **arguments) as server:
            for steps, cfg in (COLUMNS[number - 1] for number in columns):
                exact = torch.empty(0)
                for name, settings in ROWS.items():
                    key = f"{name}, {steps}, {cfg:g}"
                    if key in found and len(exact):
                        continue  # the first row, which others are compared with, is drawn again
                    result = server.run(graphs.pages(*texts, steps=steps, cfg=cfg, **settings), 3600).check()
                    pictures = page.from_latent(server.latent(result))
                    exact = exact if len(exact) else pictures
                    right = int(reader.legible(pictures, rows).sum())
                    found[key] = [right, 64 * count, psnr(pictures, exact), sum(server.step_seconds(result))]
                    print(key, *found[key], flush=True)
                    kept.write_text(json.dumps(found, indent=0))
                    Image.fromarray((pictures[0] * 255).byte().numpy()).save(folder / f"{key}.png")
    return found


def table(found: dict[str, Any]) -> str:
    """The figures as a table, of the columns that are whole."""

    def cell(name: str, steps: int, cfg: float) -> str:
        right, count, decibels, _ = found[f"{name}, {steps}, {cfg:g}"]
        low, high = (100 * part for part in interval(right, count))
        near = f"; {'over ' if decibels >= MOST_PSNR else ''}{decibels:.0f} dB"
        return f"{100 * right / count:.1f}" + (f" ({low:.1f}–{high:.1f})" if name == "one rank" else near)

    columns = [(steps, cfg) for steps, cfg in COLUMNS if all(f"{name}, {steps}, {cfg:g}" in found for name in ROWS)]
    counts = [min(found[f"{name}, {steps}, {cfg:g}"][1] for name in ROWS) for steps, cfg in columns]
    heads = [f"{steps} steps, CFG {cfg:g}, {count} digits" for (steps, cfg), count in zip(columns, counts, strict=True)]
    lines = [f"| Legible digits in % | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(cell(name, *column) for column in columns)} |" for name in ROWS]
    return "\n".join(lines)


def montage(folder: Path, panels: dict[str, str]) -> Image.Image:
    """The first rows of a page, drawn in some of the ways, one below the other, with their names."""
    steps, cfg = SHOWN
    shown = Image.new("L", (256 * 2 + 240, len(panels) * (2 * BAND + 12) - 12), 255)
    draw, font = ImageDraw.Draw(shown), ImageFont.load_default(22)
    for i, name in enumerate(panels):
        drawn = Image.open(folder / f"{name}, {steps}, {cfg:g}.png").crop((0, 0, 256, BAND))
        top = i * (2 * BAND + 12)
        shown.paste(drawn.resize((512, 2 * BAND), Image.Resampling.LANCZOS), (240, top))
        draw.text((0, top + BAND - 12), panels[name], fill=0, font=font)
    return shown


def main() -> None:
    options = common.options(
        __doc__,
        pages={"default": 16, "help": "per setting, of 64 digits each"},
        columns={"default": [1, 2, 3, 4], "help": "of the table"},
        results={"type": Path, "help": "folder that keeps what was found; what it has is not measured again"},
        write={"action": "store_true", "help": "put the table into docs/numerics.md, and pictures into the help and the README"},
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.results or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        made = table(measure(options.pages, options.columns, folder))
        print(made)
        if options.write:
            text = DOCUMENT.read_text()
            before, after = text[: text.index(START)], text[text.index(END) :]
            DOCUMENT.write_text(f"{before}{START}\n\n{made}\n\n{after}")
            for place, panels in PICTURES.items():
                montage(folder, panels).save(common.ROOT / place, quality=85)


if __name__ == "__main__":
    main()
