"""diffusers' own context parallelism as the oracle: where it is right we give the same, and where it is wrong we are right.

Each test of an error of diffusers 0.42 also holds that error to still be there: when it fails there, diffusers was fixed.
"""

import pytest
from support.ranks import DIFFUSERS, run_steps

TOLERANCE = 1e-5
WRONG = 1e-2  # far above what any order of summation could make of it


@pytest.fixture(scope="module")
def reports():
    return run_steps("api/diffusers_oracle_ranks.py", 4, by="run", preload=DIFFUSERS)


@pytest.mark.parametrize("run", ["ulysses", "ring", "unified", "ulysses anything", "ring anything", "ulysses mask"])
def test_diffusers_ours_and_one_process_agree(run, reports):
    result = reports[run]
    assert result["error"] is None
    assert result["std"] > 1e-1
    assert result["ours"] <= TOLERANCE
    assert result["theirs"] <= TOLERANCE
    assert result["between"] <= TOLERANCE


# A ring applies the key mask of its own shard to every shard; Ulysses misaligns it when two ranks are short.
@pytest.mark.parametrize("run", ["ring mask", "ulysses anything mask"])
def test_diffusers_says_nothing_and_is_wrong_by_a_key_mask(run, reports):
    result = reports[run]
    assert result["ours"] <= TOLERANCE
    assert result["error"] is None
    assert result["theirs"] > WRONG


def test_diffusers_unified_attention_crashes_on_a_key_mask(reports):
    result = reports["unified mask"]
    assert result["ours"] <= TOLERANCE
    assert result["error"] is not None
