"""The models of several runs of pytest, and the like: the first one that needs them writes them, the others copy."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

VARIABLE = "CP_TEST_MODELS"
"""Environment variable: the folder. `.ci/lanes.py` sets it; without it every run writes its own."""


def beside(name: str) -> Path | None:
    """A file that the runs of pytest share; None where there is one run only."""
    folder = os.environ.get(VARIABLE)
    return None if folder is None else Path(folder).with_name(name)


def provide(models: Path, write: Callable[[Path], object]) -> None:
    """Have a folder filled by `write`, or by a copy of what it has written for another run.

    A copy, because tests replace files and cut them off.
    """
    if VARIABLE not in os.environ:
        write(models)
        return
    shared = Path(os.environ[VARIABLE])
    with open(shared.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            part = shared.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)  # of a run that ended in the middle
            write(part)
            part.rename(shared)
    shutil.copytree(shared, models, dirs_exist_ok=True)
