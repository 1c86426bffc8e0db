"""Type checks: the runtime, the tools and the tests' support by their own names, and the node pack as ComfyUI imports it.

    make lint-mypy

The pack's own name is that of the folder it was cloned into, which may be no name in Python, and `nodes` beside it would be taken
for ComfyUI's module. So mypy sees the checkout a second time, through a link with a name of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACK = "context_parallel"


def mypy(*arguments: str, path: str = "") -> int:
    """Run mypy with the settings of pyproject.toml; returns its exit code."""
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "MYPYPATH": path}, check=False).returncode


def main() -> None:
    codes = [mypy()]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / PACK).symlink_to(ROOT)
        codes.append(mypy("-p", f"{PACK}.nodes", "-m", PACK, "--cache-dir", str(ROOT / ".mypy_cache" / PACK), path=folder))
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
