"""What every benchmark begins with: the package on the path, the machine in words, ComfyUI's folder, and figures to be shown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.package import load_package

load_package()

NOTES = "CP_BENCH_NOTES"  # file that a benchmark appends its ratios to, where it is set


def show(name: str, ratios: Mapping[str, float] | None = None, **figures: Any) -> None:
    """Print a line of figures; keep its ratios under the program's name for a comparison with the last run, if one is asked for.

    Args:
        figures: numbers; texts; (number, lower quartile, upper quartile).
    """
    shown = [f"{key.replace('_', ' ')} {_text(value)}" for key, value in {**figures, **(ratios or {})}.items()]
    print(f"{name}: {', '.join(shown)}", flush=True)
    if NOTES in os.environ:
        program = Path(sys.argv[0]).stem.replace("_", " ")
        with open(os.environ[NOTES], "a") as notes:
            for key, ratio in (ratios or {}).items():
                notes.write(json.dumps([f"{program}, {name}, {key}", round(ratio, 4)]) + "\n")


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)) and isinstance(value[0], float):
        return "{} ({} to {})".format(*map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_ranks(script: str, ranks: int, **settings: Any) -> list[dict[str, Any]]:
    """Run a benchmark as ranks with settings, and show what rank 0 reports: keywords of `show`. Returns that as well."""
    from support.ranks import run_ranks

    rows = run_ranks(Path(script), ranks, json.dumps(settings), timeout=1800)
    for row in rows:
        show(**row)
    return rows


def machine() -> dict[str, str]:
    """On what was measured."""
    import torch

    return {"machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__}


def comfyui() -> Path:
    """ComfyUI's folder. Ends the program where nobody says where it is."""
    folder = os.environ.get("COMFYUI_PATH")
    if not folder:
        sys.exit("COMFYUI_PATH is not set: run `make demo` or `make bench`, or set it to ComfyUI's folder.")
    return Path(folder)


@contextmanager
def models(*names: str) -> Iterator[Path]:
    """A folder of models, with checkpoints of these names."""
    from support import checkpoints

    with tempfile.TemporaryDirectory(prefix="context-parallel-bench-") as folder:
        for name in names:
            checkpoints.write(name, Path(folder))
        yield Path(folder)


def options(text: str | None, quick: str = "", **added: Any) -> argparse.Namespace:
    """Read the options of the command line.

    Args:
        text: of the module, whose first line describes the program.
        quick: what --quick leaves out; no such option without.
        added: an option each: its default (of several values a list, of a flag False), or what `add_argument` takes.
    """
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    for name, given in added.items():
        settings = given if isinstance(given, dict) else {"default": given}
        default = settings.get("default")
        if default is False:
            settings = {"action": "store_true", **settings}
        elif isinstance(default, (list, tuple)):
            settings = {"type": type(default[0]), "nargs": "+", **settings}
        elif default is not None:
            settings = {"type": type(default), **settings}
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    return parser.parse_args()


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return a type of option: a number above 0."""

    def parse(text: str) -> float:
        if not 0 < kind(text) <= 1 << 30:
            raise argparse.ArgumentTypeError(f"got {text}; allowed: a number above 0")
        return kind(text)

    return parse


def run(main: Callable[[], None], of_rank: Callable[..., None]) -> None:
    """Run a program, or what it does as one of the ranks that `show_ranks` has started it as, given its settings."""
    if not (len(sys.argv) > 1 and sys.argv[1].isdigit()):
        main()
        return
    from support.ranks import finish, start

    _, _, (settings,) = start()
    of_rank(**json.loads(settings))
    finish()
