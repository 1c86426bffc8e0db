"""Every model reaches the ranks by value as it is, and a call changes nothing in it."""

from pathlib import Path

import pytest
from support import families
from support.ranks import COMFY, run_steps

SCRIPT = Path(__file__).with_name("value_ranks.py")


@pytest.mark.bits("the same products in one process")
def test_a_model_by_value_computes_the_same_bits_and_stays_as_it_is():
    found = run_steps(SCRIPT, 1, by="name", preload=COMFY)
    assert found.keys() == {f"{family}, {name}" for family in families.NAMES for name in families.load(family).MODELS}
    assert sum("equal" in report for report in found.values()) > 100
    assert {name: report for name, report in found.items() if not all(report.values())} == {}
