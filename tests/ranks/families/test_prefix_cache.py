"""Qwen-Image 2.1 keeps keys and values of text and references for later steps, in one process; ranks compute them in every step."""

import pytest
from support.ranks import COMFY, run_steps


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (3, 1), (2, 1), (1, 3)])
def test_steps_equal_those_of_a_process_that_keeps_the_prefix(ring, ulysses):
    """The first step of a prompt fills the cache, later ones use it, another prompt fills it again."""
    steps = run_steps("families/prefix_ranks.py", ring * ulysses, str(ring), str(ulysses), preload=COMFY)
    assert len(steps) == 11
    for step in steps.values():
        assert (step["kept"], step["kept_here"]) == (True, False)
        assert step["by_cache"] <= 1e-5
        assert step["difference"] <= 1e-5
