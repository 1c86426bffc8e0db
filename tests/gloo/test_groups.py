"""Process groups: made by all ranks in one order, whatever ran before on some of them."""

from pathlib import Path

import pytest
from support.operations import disagreements
from support.ranks import run_ranks


@pytest.mark.parametrize("mode", ["fresh", "once"])
def test_every_order_of_calls_loads_and_decodes(mode):
    """With the right results, and the same operations on every group on all of its ranks, in one order."""
    (report,) = run_ranks(Path(__file__).with_name("group_ranks.py"), 4, mode, timeout=60)
    assert report["wrong"] == []
    assert report["groups"] <= 8  # two uses, teams of two and three, halves, and two axes of two by two
    assert report["disagreements"] == []
    assert report["kinds"] == ["all_gather", "all_reduce", "all_to_all", "barrier", "messages"]


def entry(sent, arriving, name="1", operation="all_to_all"):
    return (name, [0, 1], operation, {0: sent, 1: sent}, {0: arriving, 1: arriving})


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ([entry(6, 4), entry(8, 8, "2")], 0),
        ([entry(8, 8, "2"), entry(6, 4)], 1),  # another order
        ([entry(6, 4)], 1),
        ([entry(4, 6), entry(8, 8, "2")], 1),  # other bytes
        ([entry(6, 4, operation="messages"), entry(8, 8, "2")], 1),
        ([entry(6, 4, "3"), entry(8, 8, "2")], 1),
    ],
)
def test_ranks_that_disagree_are_told(theirs, told):
    assert len(disagreements([[entry(4, 6), entry(8, 8, "2")], theirs])) == told
