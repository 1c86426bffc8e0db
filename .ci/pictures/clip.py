"""The clip on top of the README: one graph on the ComfyUI of `make play`, run without and with Apply Context Parallel.

    make pictures

Both runs draw four pages of digits from one seed. They are recorded in a real browser, one after the other, and shown side by side,
from Run to the end. The clocks give the only figure: every call runs on both ranks, none is compared. ComfyUI and each worker have
one core, as in `make demo`; the browser takes what they leave, as one that draws on a GPU does. It takes two idle cores: what other
programs use of them can be seen in the clip.
"""

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT / "tests"), str(CHECKOUT / "benchmarks")]

from browser.conftest import ARGUMENTS, SETTINGS
from digits import graphs
from support.chromium import CHROMIUM
from support.graphs import cp_config

TARGET = CHECKOUT / "docs" / "images" / "before-after.webp"
COMMAND = "ContextParallel.UseAllGPUs"
SIDE: ViewportSize = {"width": 640, "height": 770}  # of the window
SHOWN: Any = {"x": 0, "y": 50, "width": 640, "height": 720}  # without ComfyUI's menu
BARE = {"Comfy.Graph.CanvasInfo": False, "Comfy.Graph.CanvasMenu": False}
TEXTS = ("31415926", "27182818", "16180339", "14142135")
SEED_SHOWN = 100
PATIENT = 19  # niceness of browser and recorder: they get a seventieth of a core that a rank wants
INTERVAL = 0.8  # seconds between pictures
LAST = 3.0  # seconds for which the end is shown
WIDTH, HEADER, GAP = 520, 60, 12  # pixels of a side in the clip
INK, PAPER, DONE = "#e5e7eb", "#111827", "#4ade80"
LAYOUT = """() => {
    const find = kind => app.graph.nodes.find(node => node.type === kind);
    const [sampler, apply, image] = [find("KSampler"), find("ApplyContextParallel"), find("SaveImage")];
    for (const node of app.graph.nodes) if (![sampler, apply, image].includes(node)) node.pos = [-900, 0];
    for (const node of [sampler, image]) node.imgs = null;
    sampler.pos = [0, 110];
    sampler.setSize([270, 490]);
    image.pos = [290, 110];
    image.setSize([300, 370]);
    if (apply) { apply.pos = [0, 0]; apply.setSize([270, 60]); }
    app.canvas.ds.scale = 1;
    [app.canvas.ds.offset[0], app.canvas.ds.offset[1]] = [30, 115];
    app.canvas.setDirty(true, true);
}"""
SEED = """seed => {
    const { widgets } = app.graph.nodes.find(node => node.type === "KSampler");
    for (const [named, value] of [["seed", seed], ["control_after_generate", "fixed"]])
        widgets.find(({ name }) => name === named).value = value;
}"""


def run(page: Page, seed: int) -> list[tuple[float, Image.Image]]:
    """Press Run; return pictures with the seconds since then, the last one of the end."""
    page.evaluate(SEED, seed)
    page.evaluate(
        "() => { window.cpDone = false; app.api.addEventListener('execution_success', () => { window.cpDone = true; }); }"
    )
    pictures: list[tuple[float, Image.Image]] = []
    began = time.monotonic()
    page.evaluate("app.queuePrompt(0)")
    while not (done := page.evaluate("window.cpDone")):
        pictures.append((time.monotonic() - began, Image.open(io.BytesIO(page.screenshot(clip=SHOWN)))))
        page.wait_for_timeout(1000 * INTERVAL)
    seconds = time.monotonic() - began
    page.wait_for_timeout(700)
    pictures.append((seconds if done else 0.0, Image.open(io.BytesIO(page.screenshot(clip=SHOWN)))))
    return pictures


def record(page: Page) -> list[list[tuple[float, Image.Image]]]:
    page.wait_for_function("window.app?.graph?.nodes.length > 0 && window.app.extensionManager")
    for name, value in (SETTINGS | BARE).items():
        page.evaluate("([name, value]) => app.extensionManager.setting.set(name, value)", [name, value])
    drawn = {name: node for name, node in graphs.pages(*TEXTS, cfg=4.0).items() if name != "save"}
    drawn["cp_config"] = {"class_type": "CPConfig", "inputs": cp_config(ranks_per_call="all")}  # for the node that is put in
    page.evaluate("prompt => app.loadApiJson(prompt, 'mine')", drawn)
    page.evaluate("app.api.fetchApi('/context_parallel/settings', { method: 'POST', body: '{\"measure\": false}' })")
    page.evaluate("app.extensionManager.focusMode || app.extensionManager.toggleFocusMode()")
    sides = []
    for seed in (1, 2):  # runs before those that are recorded load the model, and start workers
        if seed == 2:
            page.evaluate("command => app.extensionManager.command.execute(command)", COMMAND)
            toast = page.locator(".p-toast-message")
            toast.first.wait_for()
            page.evaluate("() => app.extensionManager.toast.removeAll()")
            expect(toast).to_have_count(0)
        page.evaluate(LAYOUT)
        run(page, seed)
        page.evaluate(LAYOUT)
        sides.append(run(page, SEED_SHOWN))
    return sides


def side(title: str, pictures: list[tuple[float, Image.Image]], seconds: float, faster: str) -> Image.Image:
    """One half of the clip at a time since Run. `faster`: said once both are done."""
    end = pictures[-1][0]
    picture = [image for at, image in pictures if at <= seconds or at == pictures[0][0]][-1].convert("RGB")
    picture = picture.resize((WIDTH, round(WIDTH * picture.height / picture.width)), Image.Resampling.LANCZOS)
    drawn = Image.new("RGB", (WIDTH, HEADER + picture.height), PAPER)
    drawn.paste(picture, (0, HEADER))
    draw = ImageDraw.Draw(drawn)
    large, small = (ImageFont.load_default(size) for size in (19, 17))
    draw.text((12, 6), title, fill=INK, font=large)
    done = seconds >= end
    draw.text((12, 30), f"{min(seconds, end):.1f} s{', done' if done else ''}{faster}", fill=DONE if done else INK, font=small)
    return drawn


def compose(sides: list[list[tuple[float, Image.Image]]]) -> list[Image.Image]:
    titles = ("One core: KSampler alone", "Two cores: with the node before it")
    length = max(pictures[-1][0] for pictures in sides)
    frames = []
    times = sides[0][-1][0] / sides[1][-1][0]
    for i in range(int((length + INTERVAL) / INTERVAL) + 1):
        faster = ("", f": {times:.1f} x as fast" if i * INTERVAL >= length else "")
        both = zip(titles, sides, faster, strict=True)
        halves = [side(title, pictures, i * INTERVAL, said) for title, pictures, said in both]
        frame = Image.new("RGB", (2 * WIDTH + GAP, halves[0].height), PAPER)
        for place, half in enumerate(halves):
            frame.paste(half, (place * (WIDTH + GAP), 0))
        frames.append(frame)
    return frames


def main() -> None:
    command = [sys.executable, str(CHECKOUT / ".ci" / "play.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        said = ""
        while not (link := re.search(r"http://127.0.0.1:\S+", said)):
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                sys.exit(f"make play ended with status {process.wait(30)}")
            said += line
        os.nice(PATIENT)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            page = browser.new_page(viewport=SIDE)
            page.set_default_timeout(180_000)
            page.goto(link[0])
            sides = record(page)
            browser.close()
    finally:
        process.send_signal(signal.SIGTERM)  # Ctrl-C is ignored by what runs in the background
        process.wait(30)
    frames = compose(sides)
    durations = [round(1000 * INTERVAL)] * (len(frames) - 1) + [round(1000 * LAST)]
    frames[0].save(TARGET, save_all=True, append_images=frames[1:], duration=durations, loop=0, quality=80, method=4)
    one, two = (pictures[-1][0] for pictures in sides)
    said = f"{TARGET.stat().st_size / 1e6:.2f} MB; {one:.1f} s and {two:.1f} s, {one / two:.2f} times as fast"
    sys.stdout.write(f"{TARGET}: {said}\n")


if __name__ == "__main__":
    main()
