"""Ulysses attention on real ranks equals attention in one process. Tolerances: docs/numerics.md."""

from pathlib import Path

import pytest
from support.ranks import run_ranks

SCRIPT = Path(__file__).with_name("ulysses_ranks.py")


@pytest.fixture(scope="module", params=[2, 3, 4])
def reports(request):
    return run_ranks(SCRIPT, request.param)


def test_float32_is_exact(reports):
    wrong = [r for r in reports if r["dtype"] == "float32" and not r["difference"] <= 1e-5]
    assert len([r for r in reports if r["dtype"] == "float32"]) == 5 * 6 * 2 * 6
    assert wrong == []


def test_bfloat16_is_no_further_from_float32_than_one_process(reports):
    wrong = [r for r in reports if r["dtype"] == "bfloat16" and not r["difference"] <= 1.5 * r["one_process"]]
    assert len([r for r in reports if r["dtype"] == "bfloat16"]) == 5 * 6 * 2 * 2
    assert wrong == []


def test_two_collectives_per_attention(reports):
    assert {r["collectives"] for r in reports} == {2}
