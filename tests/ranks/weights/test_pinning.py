"""Host memory of ranks whose devices have no room for the whole model."""

from pathlib import Path

import pytest
from support.ranks import COMFY, run_ranks

RANKS = 3


@pytest.fixture(scope="module")
def steps(checkpoints_dir):
    checkpoint = checkpoints_dir / "diffusion_models" / "flux.safetensors"
    reports = run_ranks(Path(__file__).with_name("pinning_ranks.py"), RANKS, str(checkpoint), preload=COMFY)
    return {report.pop("step"): report for report in map(dict, reports)}


def test_ranks_that_offload_share_one_copy(steps):
    at = steps["the file's weights"]
    assert at["on_host"] > 0.4 * at["model"]
    assert at["pages"] <= 1.1 * at["model"]


def test_converted_weights_are_the_pages_of_the_file_too(steps):
    at = steps["converted weights"]
    assert at["on_host"] > 0.4 * at["model"]
    assert at["pinned"] == 0
    assert 0.9 < at["pages"] / steps["the file's weights"]["model"] <= 1.1
