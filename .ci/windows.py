"""Run tests/windows with Windows' Python under Wine, or any other program.

    make windows, or python .ci/windows.py [--timeout 1800] [options for pytest]
    make windows WINDOWS_ARGS="-- program.py its arguments"

The program is in ComfyUI's environment, without a GPU: torch, ComfyUI's packages and pytest, and COMFYUI_PATH in its environment.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import windows_setup
import wine

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/windows", "--confcutdir=tests/windows", "-v", "--durations=0", "-p", "no:cacheprovider")
"""For pytest. `tests/conftest.py` is for processes that are forked."""


def main() -> int:
    arguments = sys.argv[1:]
    own = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timeout", type=float, default=1800, help="seconds until the program is ended")
    parser.add_argument("--path", default="", help="folder to import from, as PYTHONPATH")
    options, for_pytest = parser.parse_known_args(arguments[:own])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    wine.adopt()
    folder = windows_setup.environment()
    program = arguments[own + 1 :]
    if not program:
        os.chdir(ROOT)
        # `python -m pytest` would put the checkout on sys.path, where the folder nodes/ hides ComfyUI's nodes.py.
        program = [str(folder / "python" / "Lib" / "site-packages" / "pytest" / "__main__.py"), *TESTS, *for_pytest]
    began = time.monotonic()
    more = {"COMFYUI_PATH": os.environ["COMFYUI_PATH"], "PYTHONPATH": options.path}
    status = wine.run_python(folder, *program, timeout=options.timeout, **more)
    sys.stderr.write(f"[windows] status {status} after {time.monotonic() - began:.0f} s\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
