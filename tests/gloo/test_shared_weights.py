"""A model of which every rank keeps a part computes what the whole one does, bit by bit."""

import json
from pathlib import Path

import pytest
from support.ranks import COMFY, run_ranks

KINDS = {
    "flux": [],
    "flux_fp8": ["QuantizedTensor"],
    "flux_fp8_plain": [],
    "flux_fp8_scaled": ["QuantizedTensor"],
    "flux_fp8_mixed": ["QuantizedTensor"],
    "flux_int8_convrot": ["QuantizedTensor"],
    "flux_mxfp8": ["QuantizedTensor"],
    "flux_nvfp4": ["QuantizedTensor"],
}


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def reports(request, checkpoints_dir):
    folder, lora = checkpoints_dir / "diffusion_models", str(checkpoints_dir / "loras" / "flux_lora.safetensors")
    wanted = [(str(folder / f"{name}.safetensors"), lora, {}) for name in KINDS]
    wanted.append((str(folder / "flux.safetensors"), lora, {"dtype": "float8_e4m3fn"}))
    return run_ranks(Path(__file__).with_name("shared_weights_ranks.py"), request.param, json.dumps(wanted), preload=COMFY)


def test_bit_by_bit(reports):
    """As loaded, ahead of the blocks, with a LoRA, with another one, without one, unloaded and loaded again."""
    assert len(reports) == 2 * (len(KINDS) + 1)
    for report in reports:
        assert report["std"] > 1e-2, report
        assert report["lora"] > 1e-3, report
        assert report["differing"] == [], report


def test_quantised_weights_stay_quantised(reports):
    found = {report["model"]: report["kinds"] for report in reports}
    assert {name: found[f"{name}.safetensors"] for name in KINDS} == KINDS
