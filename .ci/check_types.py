"""Type checks: the runtime, the tools and the tests' support by their own names, and the node pack as ComfyUI imports it.

    make lint-mypy

The pack's own name is that of the folder it was cloned into, which may be no name in Python, and `nodes` beside it would be taken
for ComfyUI's module. So mypy sees the checkout a second time, through a link with a name of its own. What it found out about torch
takes most of the time of a first run; it stays in the user's cache, for every clone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACK = "context_parallel"


def main() -> int:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(os.environ.get("CP_CACHE") or Path(base) / "comfyui-context-parallel").expanduser() / "mypy"
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / PACK
        link.symlink_to(ROOT)
        files = ["cp_runtime", ".ci", "tests/support", str(link / "nodes"), str(link / "__init__.py")]
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(cache), *files]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, "MYPYPATH": folder}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
