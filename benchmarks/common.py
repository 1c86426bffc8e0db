"""What every benchmark begins with: the package on the path, the machine in words, ComfyUI's folder, and ratios that are kept."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.package import load_package

load_package()

NOTES = "CP_BENCH_NOTES"  # file that a benchmark appends its ratios to, where it is set


def note(name: str, ratio: float) -> None:
    """Keep a ratio for the comparison with the last run. Does nothing in a benchmark that runs by itself."""
    if NOTES in os.environ:
        with open(os.environ[NOTES], "a") as notes:
            notes.write(json.dumps([name, round(ratio, 4)]) + "\n")


def machine() -> str:
    """In words: on what was measured."""
    import torch

    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"


def comfyui() -> Path:
    """ComfyUI's folder. Ends the program where nobody says where it is."""
    folder = os.environ.get("COMFYUI_PATH")
    if not folder:
        sys.exit("COMFYUI_PATH is not set: run `make demo` or `make bench`, or set it to ComfyUI's folder.")
    return Path(folder)


def options(text: str | None, quick: str = "", **added: Any) -> argparse.Namespace:
    """Options of the command line.

    Args:
        text: of the module, whose first line describes the program.
        quick: what --quick leaves out; no such option without.
        added: an option each: its default, or what `add_argument` takes.
    """
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    for name, settings in added.items():
        settings = settings if isinstance(settings, dict) else {"type": type(settings), "default": settings}
        parser.add_argument(f"--{name}", **settings)
    return parser.parse_args()


def run(main: Callable[[], None], of_rank: Callable[[], None]) -> None:
    """Run a program, or what it does as one of the ranks that `run_ranks` has started it as."""
    (of_rank if len(sys.argv) > 1 and sys.argv[1].isdigit() else main)()
