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


def test_memory_of_a_rank_itself_is_pinned(steps):
    """Weights of another dtype than the file's are copies anyway: ComfyUI's own way is faster and takes nothing more."""
    at = steps["converted weights"]
    assert 0 < at["pinned"] <= at["on_host"]
