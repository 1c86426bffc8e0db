"""Forwards as CUDA graphs, with fake CUDA devices (`support/stand_in`): whatever ranks do, results are those of plain calls."""

import pytest
from support.faults import SOAK
from support.ranks import COMFY, run_steps

from cp_runtime.engine.graphs import FIRST, REPLAYED

MODES = {"ring 2": (2, 2, 1, "alltoall")}
MODES |= {"ulysses 2": (2, 1, 2, "allgather"), "unified 4": (4, 2, 2, "alltoall")} if SOAK else {}
ROUNDING = 1e-5  # of the CPU's kernels, which may depend on where the numbers lie
LACKS = "the device has too little memory for a recording"
TOLD = {
    "replayed": [FIRST] * 3 + [REPLAYED] * 3,
    "another size": [FIRST] * 3 + [REPLAYED] * 2,
    "weights moved on one rank": [FIRST] * 2 + [REPLAYED] * 2,
    "dropped on one rank": [FIRST] * 2 + [REPLAYED] * 2,
    "without memory": [LACKS, FIRST, FIRST, REPLAYED],
}


@pytest.fixture(scope="module", params=MODES)
def steps(request):
    world, *mode = MODES[request.param]
    options = {"timeout": 180, "preload": COMFY, "device": "cuda", "backend": "nccl"}
    return run_steps("families/graph_ranks.py", world, *map(str, mode), **options)


def test_results_are_those_of_plain_calls(steps):
    assert max(step["difference"] for step in steps.values()) <= ROUNDING
    assert not any(step["order"] for step in steps.values())


def test_calls_are_replayed_until_weights_move_or_memory_is_lacking(steps):
    """All ranks begin anew, whichever lost its recordings; a form that was recorded is not computed first."""
    for name, told in TOLD.items():
        assert all(each == told for each in steps[name]["told"]), name


def test_a_replay_counts_as_the_call_that_it_repeats(steps):
    """With one collective of 8 bytes in front of every call, and one of 4 behind the comparison."""
    counts = steps["replayed"]["counts"]
    (collectives, sent) = counts[0]
    assert counts == [[collectives, sent]] * 2 + [[2 * collectives, 2 * sent - 4]] + [[collectives, sent]] * 3


def test_what_one_rank_cannot_record_none_replays(steps):
    """It costs nobody a wait, and lasts."""
    for name, calls in (("recording fails on one rank", 4), ("it stays so", 2)):
        told = steps[name]["told"]
        assert REPLAYED not in {each for rank in told for each in rank}
        assert len(told[0]) == calls
    assert steps["recording fails on one rank"]["told"][1][-1].startswith("recording failed: CUDA error")
    assert steps["it stays so"]["told"][0][-1] == "another rank cannot"


def test_a_model_that_keeps_numbers_is_not_recorded(steps):
    """Another prompt would change them, and the comparison was before."""
    told = steps["a model that keeps numbers"]["told"]
    assert all(each[1:] == ["the model reads 1 tensors that it keeps from call to call"] * 3 for each in told)


def test_a_difference_is_the_end_of_it(steps):
    """Also on ranks that got something wrong from another one."""
    told = steps["a replay differs on one rank"]["told"]
    assert all(each.startswith("a replay differs by ") or each == "another rank cannot" for rank in told for each in rank[3:])
    assert told[1][2].startswith("a replay differs by ")
