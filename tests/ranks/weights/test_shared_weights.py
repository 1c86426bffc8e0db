"""A model of which every rank keeps a part computes what the whole one does, bit by bit."""

import json
from dataclasses import replace

import pytest
from support import checkpoints, families
from support.faults import SOAK, note
from support.ranks import COMFY, run_ranks

PLAIN, QUANTISED = ["AbsentWeight"], ["AbsentWeight", "QuantizedTensor"]
KINDS = {
    "flux": PLAIN,
    "flux_fp8_scaled": QUANTISED,
    "flux_int8_convrot": QUANTISED,
    "flux_nvfp4": QUANTISED,
    **({"flux_fp8_plain": PLAIN, "flux_fp8": QUANTISED, "flux_fp8_mixed": QUANTISED, "flux_mxfp8": QUANTISED} if SOAK else {}),
}
CAST = {"dtype": "float8_e4m3fn"}  # weight_dtype of Load Diffusion Model: what is in the file is converted


@pytest.fixture(scope="module", params=[2, 3, 4] if SOAK else [3], ids="{} ranks".format)
def all_reports(request, checkpoints_dir):
    folder, lora = checkpoints_dir / "diffusion_models", str(checkpoints_dir / "loras" / "flux_lora.safetensors")
    both = ["sharded", "offloaded"]  # the same code, on a CPU
    wanted = [(str(folder / f"{name}.safetensors"), lora, {}, both if name == "flux" else both[:1]) for name in KINDS]
    wanted.append((str(folder / "flux.safetensors"), lora, CAST, both[:1]))
    return run_ranks("weights/shared_weights_ranks.py", request.param, json.dumps(wanted), preload=COMFY)


@pytest.fixture
def reports(all_reports):
    return all_reports[1:]


@pytest.mark.bits("the same products")
def test_a_rank_that_loads_its_model_again_while_its_peers_do_not(all_reports):
    assert all_reports[0] == {"right": [True] * 4}


def differing(reports):
    return sum(len(report["differing"]) for report in reports)


@pytest.mark.bits("whole weights were the same bytes, and calls the same shapes")
def test_bit_by_bit(reports):
    """As loaded, with a LoRA, with another one, without one, ahead of the blocks, and unloaded and loaded again."""
    assert len(reports) == len(KINDS) + 2
    note("47 shared weights: quantised kinds, LoRA, loads", "outputs with other bits than of whole weights", 0, differing(reports))
    for report in reports:
        assert report["std"] > 1e-2, report
        assert report["lora"] > 1e-3, report
        assert (report["steps"], report["differing"]) == (6, []), report


def test_quantised_weights_stay_quantised(reports):
    found = {report["model"].removesuffix(".safetensors"): report["kinds"] for report in reports}
    assert found == {name: KINDS[name] for name in found}


def test_an_op_has_its_weights_no_longer_than_it_computes(reports):
    """Since ComfyUI 0.33 inside a context, which it enters and leaves as often as with a whole model, and which keeps none of them.
    The weights of a block are then those of the next one."""
    for report in reports:
        entered, left, kept = report["casts"]
        assert (left, kept) == (entered, 0), report
        assert report["casts"] == report["casts_of_whole"], report
    assert any(report["casts"][0] for report in reports) == families.exists("0.33.0")


def test_a_rank_keeps_its_part(reports):
    """And what ComfyUI's memory manager is told: all of it, or nothing."""
    for report in reports:
        assert report["part"] <= report["kept"] <= 1.05 * report["part"] + 64 * 1024, report
        assert report["told"][0] == report["told"][1] > 0
        assert report["unloaded"]
        assert report["progress"]  # it rises from nothing to all of the model, in several steps


ALLOWANCE = 24e6  # bytes; what a LoRA takes for one weight, and what libraries keep from their first use


def test_a_rank_never_holds_more_than_its_part_and_two_blocks(tmp_path, monkeypatch):
    """By the kernel's count, through two LoRA, where the C library keeps what is freed between what is in use."""
    many = checkpoints.Checkpoint(architecture=checkpoints.Flux(hidden=384, double_blocks=4, single_blocks=30))
    monkeypatch.setitem(checkpoints.CHECKPOINTS, "flux_many", many)
    monkeypatch.setitem(checkpoints.LORAS, "flux_many_lora", replace(checkpoints.LORAS["flux_lora"], base="flux_many"))
    checkpoints.write_all(["flux_many", "flux_many_lora"], tmp_path)
    (report,) = run_ranks("weights/load_peak_ranks.py", 2, str(tmp_path), preload=COMFY)
    assert report["patched"] > 60
    assert report["whole"] > 1.5 * report["bound"]
    assert report["peak"] <= 1.1 * report["bound"] + ALLOWANCE, report


@pytest.mark.parametrize(("mode", "beside"), [("asks", []), ("overlaps", ["batch"])])
def test_weights_and_tokens_are_never_under_way_together_where_nccl_keeps_no_order(mode, beside):
    """Two devices might launch them in different orders, and wait for each other. The log of launches sees where they would be."""
    script = "weights/launch_ranks.py"
    (report,) = run_ranks(script, 2, mode, timeout=60, device="cuda", backend="nccl")
    assert report["equal"]
    assert len(report["groups"]) == 2
    assert report["beside"] == beside
