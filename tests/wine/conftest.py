"""ComfyUI and its ranks run in Windows' Python under Wine; the tests are on this side, and share network and files with it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import preloaded
from support.package import ROOT
from support.server import DETECTION, ComfyServer


class WineServer(ComfyServer):
    """A ComfyUI of Windows."""

    def _launch(self, command: list[str], env: dict[str, str], files: tuple[int, int, int]) -> preloaded.Process:
        program = [sys.executable, str(ROOT / ".ci" / "windows.py"), "--path", str(DETECTION), "--timeout", "3600", "--", *command]
        return self.launched(program, env | {"COMFYUI_PATH": str(self.comfyui_path)}, files)


@pytest.fixture(scope="session")
def server(comfyui_path: Path, checkpoints_dir: Path) -> Iterator[ComfyServer]:
    with WineServer(comfyui_path, models=checkpoints_dir, startup_timeout=300) as running:
        yield running
