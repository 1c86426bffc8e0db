"""VAEs on ranks that share the rows of a picture, against the stock VAEs."""

import pytest
from support.faults import SOAK
from support.ranks import COMFY, run_ranks

BOUND = 1e-5  # relative to the largest value, float32
MEMORY = {2: 0.6, 4: 0.35}
"""Of what the stock VAE holds at one time, by ranks."""


@pytest.fixture(scope="module", params=[2, 4] if SOAK else [2])
def ran(request):
    return request.param, run_ranks("vae/vae_ranks.py", request.param, preload=COMFY)


def test_decode_and_encode_are_those_of_the_stock_vae(ran):
    _, reports = ran
    compared = [report for report in reports if "vae" in report]
    wrong = [report for report in compared if not max(report["decode"], report["encode"]) <= BOUND]
    assert not wrong, "\n".join(map(str, wrong))
    assert len({report["vae"] for report in compared}) == 11


def test_every_rank_holds_its_part_of_the_memory(ran):
    world, reports = ran
    measured = {report["memory"]: report["ratio"] for report in reports if "memory" in report}
    assert len(measured) == (2 if world in MEMORY else 0)
    assert all(ratio <= MEMORY[world] for ratio in measured.values()), measured


@pytest.mark.bits("back on one rank")
def test_vaes_of_diffusers(ran):
    world, reports = ran
    found = {report.pop("diffusers"): report for report in map(dict, reports) if "diffusers" in report}
    assert set(found) == ({"AutoencoderKL", "AutoencoderKLWan"} if world == 2 else set())
    for report in found.values():
        assert max(report["difference"], report["compiled"]) <= BOUND
        assert report["sent"] > 0
        assert report["restored"]
        assert len(report["refusals"]) == 2
        assert all("on rank 1: not what rank 0 was given" in refusal for refusal in report["refusals"])
