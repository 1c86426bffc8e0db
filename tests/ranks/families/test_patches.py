"""What travels for patches of other nodes and for ControlNets is rebuilt as it was, and names lead nowhere else."""

import os
from pathlib import Path

import pytest
from support.ranks import COMFY, run_ranks


@pytest.fixture(scope="module")
def reports():
    assert os.environ.get("COMFYUI_PATH"), "COMFYUI_PATH is not set"
    return {r.pop("name"): r for r in run_ranks(Path(__file__).with_name("patch_ranks.py"), 1, preload=COMFY)}


@pytest.mark.parametrize("name", ["network", "patches", "residuals", "attention read", "attention called"])
def test_rebuilt(name, reports):
    for what, value in reports[name].items():
        assert value is True or (isinstance(value, list) and value and all(value)), what
