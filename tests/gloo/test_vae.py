"""VAEs on ranks that share the rows of a picture, against the stock VAEs."""

from pathlib import Path

import pytest
from support.ranks import COMFY, run_ranks

BOUND = 1e-5  # relative to the largest value, float32


@pytest.fixture(scope="module", params=[2, 3, 4])
def reports(request):
    return run_ranks(Path(__file__).with_name("vae_ranks.py"), request.param, preload=COMFY)


def test_decode_and_encode_are_those_of_the_stock_vae(reports):
    wrong = [report for report in reports if not max(report["decode"], report["encode"]) <= BOUND]
    assert not wrong, "\n".join(map(str, wrong))
    assert len({report["vae"] for report in reports}) == 11
