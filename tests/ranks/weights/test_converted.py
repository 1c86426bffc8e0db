"""Weights that the loader has converted are in memory of ComfyUI's process, and bit by bit what it computes with."""

import json

import pytest
from support.ranks import COMFY, run_steps

STEPS = 8


@pytest.fixture(scope="module", params=["float16", pytest.param("bfloat16", marks=pytest.mark.soak), "float8_e4m3fn"])
def steps(request, flux):
    options = json.dumps({"dtype": request.param})
    return run_steps("weights/converted_ranks.py", 1, *flux, options, preload=COMFY, device="cuda", backend="nccl")


@pytest.mark.bits("the same products on one rank")
def test_bits_are_those_of_comfyui(steps):
    """On the device, with one LoRA and another and none, half of it moved away, evicted, and half of it loaded."""
    assert len(steps) == STEPS
    for step, report in steps.items():
        assert (report["differing"], report["same_output"], report["told"]) == ([], True, True), step


def test_no_copy_is_made_on_the_host(steps):
    for step, report in steps.items():
        assert report["common"] == report["on_host"], step
    assert steps["on the device"]["on_host"] == steps["LoRA 0.5"]["on_host"] == steps["LoRA 0.0"]["on_host"] == 0
    assert steps["evicted"]["on_device"] == 0
    assert all(steps[f"half of it {done}"]["on_host"] > 0.2 * steps["evicted"]["on_host"] for done in ("makes room", "has room"))
