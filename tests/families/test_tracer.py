"""Every table against the stock forward, one rank of two without the other."""

from pathlib import Path

import pytest
from support import families
from support.ranks import COMFY, run_ranks

from cp_runtime.engine.plan import method_of
from cp_runtime.families import PLANS

OFTEN = families.NAMES[::4]
"""Families whose tables `make test` traces. All of them run on ranks, against the stock forward: tests/ranks/families."""
SCRIPT = Path(__file__).with_name("trace_ranks.py")
CASES = [
    pytest.param(family, case.name, marks=[] if family in OFTEN else pytest.mark.soak)
    for family in families.NAMES
    for case in families.load(family).CASES
    if (plan := PLANS[families.load(family).MODELS[case.model].cls]).shares_sequence
    and {*map(method_of, plan.modules)} == {"forward"}  # that is what the tracer records
]


@pytest.fixture(scope="module")
def findings(request):
    """Findings in the cases of all families that were selected."""
    wanted = {item.callspec.params["family"] for item in request.session.items if "findings" in getattr(item, "fixturenames", ())}
    (found,) = run_ranks(SCRIPT, 1, *sorted(wanted), timeout=600, preload=COMFY)
    return found


@pytest.mark.parametrize(("family", "case"), CASES, ids=lambda value: value)
def test_a_rank_computes_what_the_stock_forward_computes(family, case, findings):
    assert findings[f"{family}/{case}"] == []
