"""The example does what its first lines say."""

import os
import re
import subprocess
import sys

import pytest
from support.package import ROOT
from support.ranks import DIFFUSERS, run_as_torchrun

SCRIPT = ROOT / "docs" / "examples" / "diffusers_torchrun.py"


def forked(*arguments):
    return run_as_torchrun(SCRIPT, 2, *arguments, timeout=120, preload=DIFFUSERS)


def started(*arguments):
    """As a user starts it: three interpreters that import torch."""
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), *arguments],
        cwd="/",  # the example finds the package by its own place
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize("run", [forked, pytest.param(started, marks=pytest.mark.soak)])
def test_diffusers_torchrun(run):
    printed = run("--ring-degree", "2", "--height", "208", "--text-tokens", "1")  # that it has options, and odd sizes
    found = re.search(
        r"one process: [\d.]+ s\n2 processes: [\d.]+ s \(ring (\d) x ulysses (\d)\)\nlargest difference: (\S+) ", printed
    )
    assert found, printed
    assert found.groups()[:2] == ("2", "1")
    assert float(found[3]) <= 1e-5
