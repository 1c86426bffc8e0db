"""The example does what its first lines say, started as a user starts it."""

import os
import re
import subprocess
import sys

from support.package import ROOT


def test_diffusers_torchrun(tmp_path):
    script = ROOT / "docs" / "examples" / "diffusers_torchrun.py"
    options = ["--ring-degree", "2", "--height", "208", "--text-tokens", "1"]  # that it has options, and odd sizes
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), *options],
        cwd=tmp_path,  # the example finds the package by its own place
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = re.search(
        r"one process: [\d.]+ s\n2 processes: [\d.]+ s \(ring (\d) x ulysses (\d)\)\nlargest difference: (\S+) ", result.stdout
    )
    assert found, result.stdout
    assert found.groups()[:2] == ("2", "1")
    assert float(found[3]) <= 1e-5
