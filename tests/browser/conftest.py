"""A real browser on a real server: Debian's Chromium, driven by Playwright.

Tests are skipped where there is no Chromium (`apt-get install chromium`, or its path in CP_CHROMIUM). With CP_SCREENSHOTS=1 they
take the pictures anew that documentation and templates show.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from support.server import CHECKOUT, ComfyServer

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CP_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
KEEP = os.environ.get("CP_SCREENSHOTS", "") == "1"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
SIZE = {"width": 1400, "height": 900}
SETTINGS = {
    "Comfy.TutorialCompleted": True,  # else the template browser opens by itself
    "Comfy.Minimap.Visible": False,
    "Comfy.ColorPalette": "dark",
    "LiteGraph.Canvas.MinFontSizeForLOD": 0,  # text also where the graph is small
    "LiteGraph.Canvas.MaximumFps": 10,  # every picture is painted by a core
}
FORGET = "localStorage.clear(); sessionStorage.clear();"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium, or set CP_CHROMIUM")
    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def profile(browser: Browser) -> Iterator[BrowserContext]:
    """What tabs share: the cache with the frontend's code. They start without what it has stored."""
    with browser.new_context(viewport=SIZE) as context:
        context.add_init_script(FORGET)
        yield context


@pytest.fixture(scope="session")
def browser_models(checkpoints_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoints, and an empty file for each that a template asks for, so that the browser misses nothing."""
    models = tmp_path_factory.mktemp("browser_models")
    for folder in checkpoints_dir.iterdir():
        (models / folder.name).mkdir()
        for file in folder.iterdir():
            (models / folder.name / file.name).symlink_to(file)
    for workflow in (CHECKOUT / "workflows").glob("*.json"):
        for node in json.loads(workflow.read_text())["nodes"]:
            for model in node["properties"].get("models", []):
                (models / model["directory"]).mkdir(exist_ok=True)
                (models / model["directory"] / model["name"]).touch()
    return models


@pytest.fixture(scope="session")
def browser_server(comfyui_path: Path, browser_models: Path) -> Iterator[ComfyServer]:
    """A server of its own: these tests look at its workers from the first one on."""
    with ComfyServer(comfyui_path, models=browser_models) as running:
        shutil.copy(comfyui_path / "input" / "example.png", running.base / "input")
        yield running


@pytest.fixture
def page(profile: BrowserContext, browser_server: ComfyServer, request: pytest.FixtureRequest) -> Iterator[Page]:
    """ComfyUI in a new tab, with more SETTINGS as parameter. An error of ours that the page did not catch fails the test."""
    errors: list[str] = []
    settings = json.dumps(SETTINGS | getattr(request, "param", {})).encode()
    (browser_server.base / "user" / "default").mkdir(exist_ok=True)
    (browser_server.base / "user" / "default" / "comfy.settings.json").write_bytes(settings)
    with contextlib.closing(profile.new_page()) as page:
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: errors.append(f"{error}\n{error.stack}"))
        page.goto(f"http://127.0.0.1:{browser_server.port}/")
        page.wait_for_function("window.app?.extensionManager && window.app.canvas && window.app.graph", timeout=60_000)
        page.locator(".context-parallel-tab-button").wait_for()
        yield page
    assert [error for error in errors if "comfyui-context-parallel" in error] == []


THEMES = ("dark", "light")


@pytest.fixture(params=THEMES if KEEP else THEMES[:1])
def theme(page: Page, request: pytest.FixtureRequest) -> str:
    """The page's colours: the test takes its pictures with each."""
    page.evaluate("theme => app.extensionManager.setting.set('Comfy.ColorPalette', theme)", request.param)
    return request.param


@pytest.fixture
def picture(page: Page) -> Callable[..., Image.Image]:
    """Takes a screenshot, and keeps it where CP_SCREENSHOTS asks for that.

    `picture(target, clip=None, width=None)`: path in the checkout; a part of the page; pixels that it is scaled down to.
    """

    def take(target: str, clip: Any = None, width: int | None = None) -> Image.Image:
        image = Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")
        if width is not None and width < image.width:
            image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
        if KEEP:
            path = CHECKOUT / target
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, **({"quality": 85} if path.suffix == ".jpg" else {"optimize": True}))
        return image

    return take
