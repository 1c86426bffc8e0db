"""A server that sees one of two fake cards, as ComfyUI under Windows hides all others from itself; its ranks see both."""

import json

import pytest
from support import stand_in
from support.graphs import flux_prompt
from support.latents import TOLERANCE, distance
from support.server import ComfyServer, PromptRejected

CARDS = stand_in.Cards(kinds=("RTX 5090", "RTX 4090"))
TWO = {"devices": "cuda:0, cuda:1"}
# Rounding to 8 bits makes 1e-2 to 9e-2 of a last bit, in half of the pictures; multiplied as floats, all are off by 7e-2 or more.
FILES = {"float": ({}, max), "fp8": ({"ckpt": "flux_fp8", "batch": 16, "steps": 1}, min)}


@pytest.fixture(scope="module")
def blind_server(comfyui_path, checkpoints_dir):
    environment = stand_in.hidden_environment(CARDS)
    with ComfyServer(comfyui_path, models=checkpoints_dir, cpu=False, args=stand_in.FLOAT32, env=environment) as running:
        yield running


def test_the_panel_offers_both(blind_server):
    offered = json.loads(blind_server.fetch("/context_parallel/devices"))["devices"]
    assert [(each["name"], each["title"]) for each in offered] == [("cuda:0", "RTX 5090"), ("cuda:1", "RTX 4090")]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("devices", ["", "cuda:0, cuda:1", "cuda:1, cuda:0"])
def test_both_compute(file, devices, blind_server):
    """All pictures of a batch equal; in fp8 one at least, where no value lies between two of 8 bits."""
    inputs, choose = FILES[file]
    expected = blind_server.sample_once(flux_prompt(**inputs))
    out = blind_server.sample(flux_prompt(cp={"devices": devices}, **inputs))
    expected_devices = devices.split(", ") if devices else ["cuda:0", "cuda:1"]
    assert [rank["device"] for rank in blind_server.status()["ranks"]] == expected_devices
    off = choose(distance(one.float(), other.float()) for one, other in zip(out, expected, strict=True))
    assert off <= TOLERANCE


def test_one_that_comfyui_does_not_compute_on_is_refused(blind_server):
    """One device is ComfyUI's own, and the model passes through."""
    with pytest.raises(PromptRejected) as rejected:
        blind_server.queue(flux_prompt(cp={"devices": "cuda:1"}))
    assert "with one entry cuda:0" in str(rejected.value.node_errors["cp_config"])


def test_both_cast_what_one_cannot_multiply(blind_server):
    """The one that is seen multiplies NVFP4, and the other one does not: nearer to the weights as floats than on that one alone."""
    exact = blind_server.sample_once(flux_prompt())
    alone = blind_server.sample_once(flux_prompt(ckpt="flux_nvfp4"))
    out = blind_server.sample(flux_prompt(ckpt="flux_nvfp4", cp=TWO))
    assert 1e-3 < distance(out.float(), exact.float()) < distance(alone.float(), exact.float())


def test_a_card_that_computes_alone_multiplies_natively(blind_server):
    """Whole runs, so that a picture is of one rounding: the first run is of both cards, the second one tries the first card."""
    size = {"ckpt": "flux_nvfp4", "steps": 3, "width": 48, "node": "CPSampler"}
    alone = blind_server.sample_once(flux_prompt(**size))
    counts = []
    while 1 not in counts and len(counts) < 6:  # on a busy machine calls may take too long at first to be tried on one card
        result = blind_server.run(flux_prompt(cp={**TWO, "ranks_per_call": "auto"}, **size)).check()
        counts.append(result.report["at_work"])
        assert result.report["casts"] == (counts[-1] == 2)
        assert (distance(blind_server.latent(result).float(), alone.float()) <= TOLERANCE) == (counts[-1] == 1)
    assert (counts[0], counts[-1]) == (2, 1)
