"""Host memory of ranks whose devices have no room for the whole model."""

import pytest
from support.ranks import COMFY, run_steps

RANKS = 3


@pytest.fixture(scope="module")
def steps(flux):
    return run_steps("weights/pinning_ranks.py", RANKS, flux[0], preload=COMFY)


def test_ranks_that_offload_share_one_copy(steps):
    at = steps["the file's weights"]
    assert at["on_host"] > 0.4 * at["model"]
    assert at["pages"] <= 1.1 * at["model"]


def test_converted_weights_are_the_pages_of_the_file_too(steps):
    at = steps["converted weights"]
    assert at["on_host"] > 0.4 * at["model"]
    assert at["pinned"] == 0
    assert 0.9 < at["pages"] / steps["the file's weights"]["model"] <= 1.1
