"""ComfyUI and its ranks run in Windows' Python under Wine; the tests are on this side, and share network and files with it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import preloaded
from support.faults import Faults
from support.package import ROOT
from support.server import DETECTION, ComfyServer

collect_ignore_glob = [] if os.environ.get("CP_TEST_WINE") == "1" else ["test_*.py"]  # `make windows` sets it


class WineServer(ComfyServer):
    """A ComfyUI of Windows."""

    def _launch(self, command: list[str], env: dict[str, str], files: tuple[int, int, int]) -> preloaded.Process:
        program = [sys.executable, str(ROOT / ".ci" / "windows.py"), "--path", str(DETECTION), "--timeout", "3600", "--", *command]
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        cache = os.environ.get("CP_CACHE") or os.path.join(home, "comfyui-context-parallel")  # Windows' Python is there
        return self.launched(program, env | {"COMFYUI_PATH": str(self.comfyui_path), "CP_CACHE": cache}, files)

    def worker_pids(self) -> list[int]:
        """Those that Windows knows the workers by."""
        return [rank["pid"] for rank in self.status()["ranks"]]


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def server(comfyui_path: Path, checkpoints_dir: Path, faults: Faults) -> Iterator[ComfyServer]:
    with WineServer(comfyui_path, models=checkpoints_dir, env=faults.environment, startup_timeout=300) as running:
        yield running


@pytest.fixture(scope="session")
def vae_files(checkpoints_dir: Path) -> None:
    """Writes the files of `support.vaes`."""
    preloaded.write_models("support.vaes", checkpoints_dir)
