"""Weights that the loader converts stay in the pages of the file, and are bit by bit what ComfyUI computes with."""

import json
from pathlib import Path

import pytest
from support.ranks import COMFY, run_ranks

STEPS = 8


@pytest.fixture(scope="module", params=["float16", "float8_e4m3fn"])
def steps(request, checkpoints_dir):
    files = [
        str(checkpoints_dir / folder / f"{name}.safetensors")
        for folder, name in (("diffusion_models", "flux"), ("loras", "flux_lora"))
    ]
    reports = run_ranks(
        Path(__file__).with_name("converted_ranks.py"), 1, *files, json.dumps({"dtype": request.param}),
        preload=COMFY, device="cuda", backend="nccl",
    )  # fmt: skip
    return {report.pop("step"): report for report in map(dict, reports)}


def test_bits_are_those_of_comfyui(steps):
    """On the device, with one LoRA and another and none, half of it moved away, evicted, and half of it loaded."""
    assert len(steps) == STEPS
    for step, report in steps.items():
        assert (report["differing"], report["same_output"], report["told"]) == ([], True, True), step


def test_no_copy_is_made_on_the_host(steps):
    for step, report in steps.items():
        assert report["in_file"] == report["on_host"], step
    assert steps["on the device"]["on_host"] == steps["LoRA 0.5"]["on_host"] == steps["LoRA 0.0"]["on_host"] == 0
    assert steps["evicted"]["on_device"] == 0
    assert all(steps[f"half of it {done}"]["on_host"] > 0.2 * steps["evicted"]["on_host"] for done in ("makes room", "has room"))
