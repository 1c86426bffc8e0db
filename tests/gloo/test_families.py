"""Every family and feature: the sharded forward equals the stock forward in one process. Tolerances: docs/numerics.md."""

import os
import sys
from pathlib import Path

import pytest
from support.ranks import run_ranks

HERE = Path(__file__).parent
sys.path.append(str(HERE))
from family_cases import CASES  # noqa: E402

# ring degree, ulysses degree, rotate_method
MODES = {
    "ulysses 2": (1, 2, "allgather"),
    "ulysses 3": (1, 3, "allgather"),
    "ring 2": (2, 1, "allgather"),
    "ring 3": (3, 1, "alltoall"),
    "unified 4": (2, 2, "alltoall"),
}


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def reports(mode):
    assert os.environ.get("COMFYUI_PATH"), "COMFYUI_PATH is not set"
    ring, ulysses, _ = MODES[mode]
    return {r["case"]: r for r in run_ranks(HERE / "family_ranks.py", ring * ulysses, *map(str, MODES[mode]))}


@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_sharded_forward_equals_stock_forward(case, reports):
    result = reports[case]
    assert result["std"] > 1e-2
    assert result["difference"] <= 1e-5
    assert result["collectives"] > 1
    if result["mask_matters"] is not None:
        assert result["mask_matters"] > 1e-2


def test_cross_attention_to_replicated_text_costs_nothing(mode, reports):
    """Two blocks with self- and cross-attention: two shared attentions, and the output is gathered."""
    expected = {
        "ulysses 2": {"all_to_all": 4, "all_gather": 1},
        "ulysses 3": {"all_to_all": 4, "all_gather": 1},
        "ring 2": {"all_gather": 3},
        "ring 3": {"exchange": 4, "all_gather": 1},
        "unified 4": {"all_to_all": 4, "exchange": 2, "all_gather": 1},
    }
    assert reports["wan t2v"]["counts"] == expected[mode]


def test_removed_plans_leave_no_hooks(reports):
    assert reports["removed"]["hooks"] == 0
