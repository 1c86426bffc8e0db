"""ComfyUI and its ranks run in Windows' Python under Wine; the tests are on this side, and share network and files with it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import preloaded
from support.faults import Faults
from support.package import ROOT, load_script
from support.server import DETECTION, ComfyServer

collect_ignore_glob = [] if os.environ.get("CP_TEST_WINE") == "1" else ["test_*.py"]  # `make windows` sets it


class WineServer(ComfyServer):
    """A ComfyUI of Windows."""

    def _launch(self, command: list[str], env: dict[str, str], files: tuple[int, int, int]) -> preloaded.Process:
        program = [sys.executable, str(ROOT / ".ci" / "windows.py"), "--path", str(DETECTION), "--timeout", "3600", "--", *command]
        cache = load_script(ROOT / ".ci" / "setup.py").environment_folder().parent  # not the server's own: Windows' Python is there
        return self.launched(program, env | {"COMFYUI_PATH": str(self.comfyui_path), "CP_CACHE": str(cache)}, files)

    def worker_pids(self) -> list[int]:
        """Those that Windows knows the workers by."""
        return [rank["pid"] for rank in self.status()["ranks"]]


@pytest.fixture(scope="session")
def server(comfyui_path: Path, checkpoints_dir: Path, faults: Faults) -> Iterator[ComfyServer]:
    with WineServer(comfyui_path, models=checkpoints_dir, env=faults.environment, startup_timeout=300) as running:
        yield running
