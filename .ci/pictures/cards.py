"""Draw the pictures of the templates: what the model makes, and how devices, each a colour, share it.

make pictures
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import sync_playwright

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "tests"))

from browser.conftest import ARGUMENTS, save
from support.chromium import CHROMIUM

SIDE = 480
DEVICES = ("#38bdf8", "#fbbf24", "#fb7185", "#4ade80")
PAGE = """<body style="margin: 0"><svg xmlns="http://www.w3.org/2000/svg" width="{side}" height="{side}" font-family="DejaVu Sans">
<linearGradient id="sky" x2="1" y2="1"><stop stop-color="{light}"/><stop offset="1" stop-color="{dark}"/></linearGradient>
<rect width="100%" height="100%" fill="url(#sky)"/>
<text x="30" y="84" font-size="{size}" font-weight="bold" fill="white">{title}</text>
<text x="32" y="124" font-size="25" fill="white" opacity=".85">{subtitle}</text>
{drawing}
</svg></body>"""


def shared(x: float, y: float, width: float, height: float, devices: tuple[str, ...] = DEVICES) -> str:
    """A picture whose rows devices share."""
    row = height / len(devices)
    rows = (f'<rect x="{x}" y="{y + i * row}" width="{width}" height="{row - 3}" fill="{c}"/>' for i, c in enumerate(devices))
    return "".join(rows) + scene(x, y, width, height, 'fill="black" opacity=".35"', 'fill="white" opacity=".8"')


def scene(x: float, y: float, width: float, height: float, hill: str, sun: str) -> str:
    """What every picture shows, in these styles."""
    path = f"M{x} {y + height - 3} L{x + width * 0.35} {y + height * 0.4} L{x + width * 0.55} {y + height * 0.7} "
    path += f"L{x + width * 0.7} {y + height * 0.55} L{x + width} {y + height - 3} Z"
    disc = f'<circle cx="{x + width * 0.75}" cy="{y + height * 0.25}" r="{height * 0.11}" {sun}/>'
    return f'<path d="{path}" {hill}/>' + disc


def picture() -> str:
    return shared(110, 165, 260, 260)


def tall() -> str:
    return shared(150, 150, 180, 300)


def wide() -> str:
    return shared(40, 190, 400, 220)


def video(x: float = 40, count: int = 4) -> str:
    return "".join(frames(x, count))


def frames(x: float, count: int) -> Iterator[str]:
    for i in range(count):
        left, top = x + 62 * i, 300 - 36 * i
        yield f'<rect x="{left - 5}" y="{top - 5}" width="212" height="132" fill="black" opacity=".7"/>'
        yield shared(left, top, 202, 122)


def animated_picture() -> str:
    start = '<rect x="28" y="245" width="120" height="120" fill="white"/>' + shared(34, 251, 108, 108, ("#94a3b8",))
    arrow = '<path d="M156 305 h30 m-14 -14 l14 14 l-14 14" stroke="white" stroke-width="7" fill="none"/>'
    return start + arrow + video(198, 2)


def video_with_sound() -> str:
    """Frames from a picture above a wave, of whose bars every device has some."""
    heights = [24, 52, 78, 40, 64, 92, 56, 30, 70, 88, 46, 62, 34, 74, 50, 26]
    colours = [colour for colour in DEVICES for _ in range(len(heights) // len(DEVICES))]
    bars = (
        f'<rect x="{34 + 26 * i}" y="{412 - height / 2}" width="17" height="{height}" rx="8" fill="{colour}"/>'
        for i, (height, colour) in enumerate(zip(heights, colours, strict=True))
    )
    return f'<g transform="translate(0 -70)">{animated_picture()}</g>' + "".join(bars)


def halves() -> str:
    """Prompt and negative prompt."""
    sign = '<text x="{}" y="440" font-size="54" font-weight="bold" fill="white" text-anchor="middle">{}</text>'
    drawn = shared(30, 180, 195, 195, DEVICES[:2]) + shared(255, 180, 195, 195, DEVICES[2:])
    return drawn + sign.format(127, "+") + sign.format(352, "–")


def enlarged() -> str:
    """A small picture, and a large one of tiles."""
    small = '<rect x="28" y="255" width="100" height="100" fill="white"/>'
    small += scene(34, 261, 88, 88, 'fill="#475569"', 'fill="#94a3b8"')
    arrow = '<path d="M138 305 h34 m-15 -15 l15 15 l-15 15" stroke="white" stroke-width="7" fill="none"/>'
    places = itertools.product(range(3), range(3))
    tiles = (
        f'<rect x="{186 + 90 * x}" y="{172 + 90 * y}" width="87" height="87" fill="{DEVICES[(x + y) % 4]}"/>' for x, y in places
    )
    return small + arrow + "".join(tiles) + scene(186, 172, 267, 267, 'fill="black" opacity=".35"', 'fill="white" opacity=".8"')


def edges() -> str:
    """Those of a picture, and a picture along them."""
    line = 'fill="none" stroke="white" stroke-width="4" stroke-linejoin="round"'
    found = '<rect x="28" y="223" width="152" height="152" fill="black"/>' + scene(40, 235, 128, 128, line, line)
    arrow = '<path d="M192 299 h34 m-15 -15 l15 15 l-15 15" stroke="white" stroke-width="7" fill="none"/>'
    return found + arrow + shared(240, 192, 214, 214)


def steps() -> str:
    """Some are computed, some are left out."""
    out = '<rect x="{}" y="{}" width="118" height="118" fill="none" stroke="white" stroke-width="4" stroke-dasharray="10 9"/>'
    places = [(x, y) for y in (165, 310) for x in (32, 181, 330)]
    return "".join(out.format(x, y) if i in (1, 3, 4) else shared(x, y, 118, 118) for i, (x, y) in enumerate(places))


def blocks() -> str:
    """A picture of large squares: few different numbers."""
    side, heights = 36, (1, 2, 4, 5, 3, 4, 3, 2)  # of a hill
    squares = []
    for column, row in itertools.product(range(8), range(8)):
        x, y, sun = 96 + side * column, 158 + side * row, (column, row) in ((6, 1), (6, 2))
        squares.append(f'<rect x="{x}" y="{y}" width="{side - 4}" height="{side - 4}" fill="{DEVICES[row // 2]}"/>')
        if sun or row >= 8 - heights[column]:
            shade, opacity = ("white", 0.8) if sun else ("black", 0.35)
            squares.append(f'<rect x="{x}" y="{y}" width="{side - 4}" height="{side - 4}" fill="{shade}" opacity="{opacity}"/>')
    return "".join(squares)


def parts() -> str:
    """A model, of which each device keeps a part, wider than the card of any of them."""
    drawn = (
        '<rect x="28" y="160" width="424" height="96" rx="10" fill="none" stroke="white" stroke-width="4" stroke-dasharray="10 9"/>'
    )
    for i, colour in enumerate(DEVICES):
        x = 40 + 102 * i
        drawn += f'<rect x="{x}" y="172" width="94" height="72" fill="{colour}"/>'
        drawn += f'<path d="M{x + 47} 262 v44 m-13 -15 l13 15 l13 -15" stroke="white" stroke-width="6" fill="none"/>'
        drawn += f'<rect x="{x}" y="318" width="94" height="120" rx="8" fill="#111827" stroke="{colour}" stroke-width="5"/>'
        drawn += f'<rect x="{x + 12}" y="332" width="70" height="44" fill="{colour}"/>'
        drawn += f'<circle cx="{x + 47}" cy="406" r="20" fill="none" stroke="{colour}" stroke-width="5"/>'
    return drawn


CARDS = {
    "Flux on all GPUs": ("Flux", "text to image", "#6d28d9", "#1e1b4b", picture),
    "Flux with ControlNet on all GPUs": ("ControlNet", "Flux, along a picture's edges", "#0e7490", "#083344", edges),
    "Flux with EasyCache on all GPUs": ("EasyCache", "Flux, without needless steps", "#334155", "#020617", steps),
    "MiniMax-H3 image to video on all GPUs": ("MiniMax-H3", "image to video with sound", "#65a30d", "#1a2e05", video_with_sound),
    "GGUF on all GPUs": ("GGUF", "Flux, quantised", "#475569", "#0f172a", blocks),
    "Model larger than one GPU": ("Larger models", "each GPU keeps a part", "#be185d", "#1f0a1a", parts),
    "Qwen-Image on all GPUs": ("Qwen-Image", "text to image", "#0f766e", "#022c22", wide),
    "SDXL with CFG on all GPUs": ("SDXL", "CFG: a half each", "#b91c1c", "#450a0a", halves),
    "Upscaling on all GPUs": ("Upscaling", "with ESRGAN and its like", "#7c3aed", "#0c4a6e", enlarged),
    "Wan 2.2 image to video on all GPUs": ("Wan 2.2", "image to video", "#c2410c", "#431407", animated_picture),
    "Wan 2.2 text to video on all GPUs": ("Wan 2.2", "text to video", "#1d4ed8", "#172554", video),
    "Z-Image on all GPUs": ("Z-Image", "text to image", "#a8a29e", "#44403c", tall),
}


def card(name: str) -> str:
    """The page to take the picture of a template from."""
    title, subtitle, light, dark, drawing = CARDS[name]
    size = min(64, round(560 / len(title)))
    return PAGE.format(side=SIDE, title=title, subtitle=subtitle, light=light, dark=dark, drawing=drawing(), size=size)


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": SIDE, "height": SIDE})
        for name in CARDS:
            page.set_content(card(name))
            save(page.screenshot(), f"workflows/{name}.jpg")
        browser.close()


if __name__ == "__main__":
    main()
