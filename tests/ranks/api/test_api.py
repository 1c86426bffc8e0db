"""What users do to a module that is context parallel, besides calling it."""

import pytest
from support.ranks import run_ranks

SCRIPT = "api/api_ranks.py"


@pytest.mark.parametrize("world", [2, 4])
def test_use_and_misuse(world):
    reports = run_ranks(SCRIPT, world)
    assert [r["name"] for r in reports if not r["held"]] == []
    assert len(reports) == (87 if world == 2 else 80)
