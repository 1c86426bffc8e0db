"""Process groups: made by all ranks in one order, whatever ran before on some of them."""

from pathlib import Path

import pytest
from support.ranks import run_ranks


@pytest.mark.parametrize("mode", ["fresh", "once"])
def test_every_order_of_calls_loads_and_decodes(mode):
    (report,) = run_ranks(Path(__file__).with_name("group_ranks.py"), 4, mode, timeout=60)
    assert report["wrong"] == []
    assert report["groups"] <= 8  # two uses, teams of two and three, halves, and two axes of two by two
