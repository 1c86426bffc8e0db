"""What tests that need no ComfyUI share."""

import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support import preloaded

TESTS = Path(__file__).resolve().parents[1]
ON_CARDS = """
import torch
from support import stand_in
from support.package import load_package

load_package()
stand_in.use(stand_in.Cards({cards}))


def refused(kind, words, act):
    try:
        act()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{{words}}: not refused")
"""

Run = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def run_program(tmp_path: Path) -> Run:
    """Runs a program in a process of its own, where nothing else changes, and insists on a good end."""

    def run(text: str, *arguments: str, cwd: Path = tmp_path, **environment: str) -> CompletedProcess[str]:
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(text))
        env = {**os.environ, "PYTHONPATH": str(TESTS), **environment}
        done = preloaded.run([str(program), *arguments], cwd=cwd, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def run_on_cards(run_program: Run) -> Run:
    """Runs a program on fake CUDA devices, which change torch; `cards`: arguments of `stand_in.Cards`."""
    return lambda text, cards="": run_program(ON_CARDS.format(cards=cards) + text)
