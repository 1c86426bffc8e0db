"""A real browser on a real server: Debian's Chromium, driven by Playwright.

Tests are skipped where there is no Chromium (`apt-get install chromium`, or its path in CP_CHROMIUM). With CP_SCREENSHOTS=docs/images
the pictures that documentation shows are taken again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright
from support.server import CHECKOUT, ComfyServer

CHROMIUM = os.environ.get("CP_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
SCREENSHOTS = os.environ.get("CP_SCREENSHOTS", "")
PATIENCE = 30_000  # milliseconds that the page may take for anything
ARGUMENTS = [
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
SETTINGS = {
    "Comfy.TutorialCompleted": True,  # no template browser over everything at the first visit
    "Comfy.InstalledVersion": "1.47.12",
    "Comfy.Release.Status": "skipped",
    "Comfy.Workflow.WarnBlueprintOverwrite": False,
}


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as running:
        yield running


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium, or set CP_CHROMIUM")
    running = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
    yield running
    running.close()


@pytest.fixture(scope="session")
def browser_server(comfyui_path: Path, checkpoints_dir: Path) -> Iterator[ComfyServer]:
    with ComfyServer(comfyui_path, models=checkpoints_dir) as running:
        yield running
