"""A rank that has the blocks of one stage: the result is the whole model's, bit by bit, with a LoRA and in quantised kinds."""

import json

import pytest
from support.faults import SOAK
from support.ranks import COMFY, run_ranks

ROUNDED = ("flux_fp8_scaled", "flux_int8_convrot", "flux_nvfp4")
EXACT = ("flux", "flux_fp8_plain")
KINDS = ("flux", "flux_nvfp4", *((*ROUNDED[:2], "flux_fp8", "flux_fp8_plain", "flux_fp8_mixed", "flux_mxfp8") if SOAK else ()))


@pytest.fixture(scope="module")
def reports(checkpoints_dir):
    folder, lora = str(checkpoints_dir / "diffusion_models"), str(checkpoints_dir / "loras" / "flux_lora.safetensors")
    found = run_ranks("weights/staged_weights_ranks.py", 2, folder, lora, json.dumps(KINDS), preload=COMFY)
    return {report["model"]: report for report in found}


@pytest.mark.bits("a stage runs whole blocks on whole tokens")
@pytest.mark.parametrize("kind", KINDS)
def test_stages_of_a_model(kind, reports):
    report = reports[kind]
    assert report["std"] > 1e-2
    assert report["lora"] > 1e-3
    assert (report["steps"], report["differing"]) == (5, [])
    # Of the same inputs. Layers that round their inputs by the largest of them round a patch's otherwise.
    assert report["stale"] <= (1e-5 if kind in EXACT else 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_has_its_stage_and_what_is_outside_of_blocks(kind, reports):
    report = reports[kind]
    outside = sum(report["held"]) - report["whole"]
    largest = max(report["held"])
    assert 0 < outside < largest < 0.8 * report["whole"]  # blocks of a tiny model are few, and not of one size
    for held, told in zip(report["held"], report["told"], strict=True):
        assert abs(told - held) <= 0.05 * held + 4096
