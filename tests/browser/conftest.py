"""A real browser on a real server: Debian's Chromium, driven by Playwright.

Tests are skipped where there is no Chromium (`apt-get install chromium`, or its path in CP_CHROMIUM). With CP_SCREENSHOTS=1 they
take the pictures anew that come of a run, and others into shots/.
"""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Route, ViewportSize, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from support.chromium import CHROMIUM, MISSING
from support.server import CHECKOUT, CUSTOM_NODES, GGUF_NODES, ComfyServer
from support.ssh import put_ssh

KEEP = os.environ.get("CP_SCREENSHOTS", "") == "1"
PIXELS = 1024 if KEEP else 512  # pixels of what is sampled: pictures show what two processes gain of a large one
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--blink-settings=imageAnimationPolicy=2",  # thumbnails of templates show their first picture
]
SIZE: ViewportSize = {"width": 1400, "height": 900}
SETTINGS = {
    "Comfy.TutorialCompleted": True,  # else the template browser opens by itself
    "Comfy.Minimap.Visible": False,
    "Comfy.ColorPalette": "dark",
    "LiteGraph.Canvas.MinFontSizeForLOD": 0,  # text also where the graph is small
    "LiteGraph.Canvas.MaximumFps": 5,  # every picture is painted by a core
}
TIDY = """() => {
    app.graph.clear();
    LiteGraph.closeAllContextMenus();
    if (app.extensionManager.focusMode) app.extensionManager.toggleFocusMode();
    app.extensionManager.sidebarTab.activeSidebarTabId = null;
    app.extensionManager.toast.removeAll();
    app.extensionManager.setting.set('Comfy.RightSidePanel.IsOpen', false);
    document.querySelectorAll("[data-testid='error-overlay-dismiss']").forEach(button => button.click());
}"""
IS_TIDY = """() => [...document.querySelectorAll(
    "[role='dialog'], [data-testid^='error-overlay'], .node-help-content, .cp-panel, .node-tooltip, .p-toast-message"
)].every(element => !element.checkVisibility())"""
FORGET = "localStorage.clear(); sessionStorage.clear();"
# Nothing moves, and ComfyUI looks ten times a second for what to paint: a core paints every picture.
STILL = """const nextFrame = requestAnimationFrame.bind(window);
window.requestAnimationFrame = callback => setTimeout(() => nextFrame(callback), 80);
window.cancelAnimationFrame = clearTimeout;
document.addEventListener('DOMContentLoaded', () => {
    const style = document.createElement('style');
    style.textContent = '*, *::before, *::after { animation-iteration-count: 1 !important; animation-duration: 1ms !important; '
        + 'animation-delay: 0s !important; transition-duration: 0s !important; transition-delay: 0s !important }';
    document.head.append(style);
})"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(MISSING)
    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def profile(browser: Browser) -> Iterator[BrowserContext]:
    """A page starts without what another has stored."""
    with browser.new_context(viewport=SIZE) as context:
        context.add_init_script(FORGET)
        context.add_init_script(STILL)
        yield context


@pytest.fixture(scope="session")
def browser_models(checkpoints_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoints, and an empty file for each that a template asks for, so that the browser misses nothing."""
    models = tmp_path_factory.mktemp("browser_models")
    for folder in checkpoints_dir.iterdir():
        (models / folder.name).mkdir()
        for file in folder.iterdir():
            (models / folder.name / file.name).symlink_to(file)
    put_models(models)
    return models


def put_models(models: Path) -> None:
    """Make an empty file for each that a template asks for."""
    for workflow in (CHECKOUT / "workflows").glob("*.json"):
        for node in json.loads(workflow.read_text())["nodes"]:
            for model in node["properties"].get("models", []):
                (models / model["directory"]).mkdir(exist_ok=True)
                (models / model["directory"] / model["name"]).touch()


@pytest.fixture(scope="session")
def browser_server(comfyui_path: Path, browser_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A server of its own: these tests look at its workers from the first one on."""
    env = put_ssh(tmp_path_factory.mktemp("ssh"))
    with ComfyServer(comfyui_path, models=browser_models, custom_nodes=CUSTOM_NODES | GGUF_NODES, env=env) as running:
        shutil.copy(comfyui_path / "input" / "example.png", running.base / "input")
        yield running


class Tab:
    """The one tab, which tests share as long as it is as they found it: a load of the frontend takes five seconds of a core."""

    def __init__(self, profile: BrowserContext, server: ComfyServer) -> None:
        self.page, self._server = profile.new_page(), server
        self.page.set_default_timeout(30_000)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(f"{error}\n{error.stack}"))
        self._start: dict[str, Any] | None = None
        """What the page was loaded with; None where it has to be loaded again."""

    def show(self, start: dict[str, Any]) -> None:
        """Show ComfyUI as it is after a start with these settings and answers (see `page`), but for the graph."""
        if start == self._start and self._is_tidy():
            return
        settings = {name: value for name, value in start.items() if not name.startswith("/")}
        (self._server.base / "user" / "default").mkdir(exist_ok=True)
        (self._server.base / "user" / "default" / "comfy.settings.json").write_text(json.dumps(settings))
        self.page.unroute_all()
        for address in start.keys() - settings.keys():
            self.page.route(f"**{address}", partial(_answer, start[address]))
        self.page.set_viewport_size(SIZE)
        self.page.goto(f"http://127.0.0.1:{self._server.port}/")
        self.page.wait_for_function("window.app?.extensionManager && window.app.canvas && window.app.graph", timeout=60_000)
        self.page.locator(".context-parallel-tab-button").wait_for()
        self._start = start

    def spoil(self) -> None:
        """Have the page loaded again for the next test."""
        self._start = None

    def _is_tidy(self) -> bool:
        self.page.evaluate(TIDY)
        self.page.mouse.move(0, 0)
        self.page.set_viewport_size(SIZE)
        with contextlib.suppress(PlaywrightTimeout):
            self.page.wait_for_function(IS_TIDY, timeout=1000)
            return True
        return False


def _answer(content: Any, route: Route) -> None:
    route.fulfill(json=content)


@pytest.fixture(scope="session")
def tab(profile: BrowserContext, browser_server: ComfyServer) -> Iterator[Tab]:
    opened = Tab(profile, browser_server)
    yield opened
    opened.page.close()


@pytest.fixture
def page(tab: Tab, request: pytest.FixtureRequest) -> Iterator[Page]:
    """ComfyUI, with more SETTINGS as parameter. An error of ours that the page did not catch fails the test.

    What begins with a slash is no setting, but an address of the server, with what is answered there in its place.
    """
    tab.show(SETTINGS | getattr(request, "param", {}))
    tab.errors.clear()
    failed = request.session.testsfailed
    yield tab.page
    if request.session.testsfailed > failed:
        tab.spoil()
    assert [error for error in tab.errors if "comfyui-context-parallel" in error] == []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with settings of their own come first, together: the page is loaded for every change of them."""

    def key(item: pytest.Item) -> str:
        return json.dumps(item.callspec.params.get("page", {}) if hasattr(item, "callspec") else {}, sort_keys=True)

    items.sort(key=key)


GPUS = ("4090", "3090", "3090")
FOUND = {
    "devices": [{"name": f"cuda:{i}", "title": f"RTX {name}", "memory": 24 << 30} for i, name in enumerate(GPUS)],
    "indirect": ["cuda:0 to cuda:1", "cuda:1 to cuda:0"],
    "reason": None,
}
MADE_UP_GPUS = pytest.mark.parametrize("page", [{"/context_parallel/devices": FOUND}], ids=["made-up"], indirect=True)
"""What a machine with three GPUs has; the page asks for that once."""


THEMES = ("dark", "light")
THEME = "theme => app.extensionManager.setting.set('Comfy.ColorPalette', theme)"


@pytest.fixture(params=THEMES if KEEP else THEMES[:1])
def theme(page: Page, request: pytest.FixtureRequest) -> str:
    """The page's colours: the test takes its pictures with each."""
    chosen: str = request.param
    page.evaluate(THEME, chosen)
    return chosen


@pytest.fixture
def picture(page: Page) -> Callable[..., None]:
    """Takes a screenshot where CP_SCREENSHOTS asks for that.

    `picture(target, settle=0, prepare=None, clip=None, width=None)`: path in the checkout; milliseconds in which images come and
    nothing moves any more; what makes the page fit to be seen; the part of it to take; pixels that it is scaled down to.
    """

    def take(target: str, *, settle: int = 0, prepare: Any = None, clip: Any = None, width: int | None = None) -> None:
        if not KEEP:
            return
        if prepare is not None:
            prepare()
        page.wait_for_timeout(settle)
        save(page.screenshot(clip=clip() if clip is not None else None), target, width)

    return take


def save(screenshot: bytes, target: str, width: int | None = None) -> None:
    """Write a screenshot into the checkout, scaled down to a width."""
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    if width is not None and width < image.width:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    path = CHECKOUT / target
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **({"quality": 85} if path.suffix == ".jpg" else {"optimize": True}))


CP = {"world_size": 2, "ulysses_degree": 2}


@pytest.fixture
def panel(page: Page) -> Locator:
    """The opened status panel."""
    page.locator(".context-parallel-tab-button").click()
    shown = page.get_by_test_id("context-parallel-panel")
    expect(shown).to_be_visible()
    return shown
