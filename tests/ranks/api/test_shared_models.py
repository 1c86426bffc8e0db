"""diffusers models of which every rank keeps 1/N: the same bits as with whole weights, in 1/N of the memory."""

import pytest
from support.ranks import DIFFUSERS, run_ranks


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_same_bits_and_the_weights_come_back(world):
    reports = run_ranks("api/shared_ranks.py", world, preload=DIFFUSERS)
    assert [report["model"] for report in reports] == ["flux", "wan", "sd3"]
    for report in reports:
        assert report["equal"] == {"first": True, "second": True, "restored": True}, report
        assert report["weights"], report
        assert report["gathers"] > 0
        assert report["held"] <= report["bound"], report
