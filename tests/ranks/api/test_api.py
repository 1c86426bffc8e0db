"""What users do to a module that is context parallel, besides calling it; and the example does what its first lines say."""

import os
import re
import subprocess
import sys

import pytest
from support.package import ROOT
from support.ranks import DIFFUSERS, run_as_torchrun, run_ranks

EXAMPLE = ROOT / "docs" / "examples" / "diffusers_torchrun.py"


@pytest.mark.bits("the same shares of tokens, with whole weights or parts")
@pytest.mark.parametrize("world", [2, 4])
def test_use_and_misuse(world):
    reports = run_ranks("api/api_ranks.py", world)
    assert [r["name"] for r in reports if not r["held"]] == []
    assert len(reports) == (101 if world == 2 else 94)


def forked(*arguments):
    return run_as_torchrun(EXAMPLE, 2, *arguments, timeout=120, preload=DIFFUSERS)


def started(*arguments):
    """As a user starts it: three interpreters that import torch."""
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE), *arguments],
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
