"""A model file that does not fit into memory is loaded by ComfyUI's own loader without being copied, and serves as any other."""

import pytest
from support.ranks import COMFY, run_steps


@pytest.fixture(scope="module")
def steps(flux):
    return run_steps("weights/host_memory_ranks.py", 1, *flux, preload=COMFY)


def test_a_file_that_fits_is_copied_and_one_that_does_not_is_mapped(steps):
    """Bytes of this process's own memory, by the kernel."""
    (in_file, total), (mapped, _) = steps["loaded"]["stock"], steps["loaded"]["mapped"]
    assert (in_file, mapped) == (0, total)
    assert steps["loaded"]["copied"] >= 0.95 * total
    assert steps["loaded"]["kept"] <= 0.05 * total


@pytest.mark.bits("one rank, weights at their old addresses")
def test_a_mapped_model_serves_as_a_copied_one(steps):
    """The same numbers through a LoRA in place, without it, unloaded and loaded again; the same file when it is saved."""
    assert steps["life"] == {"same": [True, True, True], "file": True}


def test_a_file_that_was_cut_off_is_an_error_and_no_signal(steps):
    assert steps["cut"]["stock"] == ""
    assert "changed on disk after ComfyUI had loaded it" in steps["cut"]["mapped"]


def test_what_the_loader_converts_is_copied(steps):
    mapped, total = steps["converted"]["mapped"]
    assert mapped < 0.05 * total
    assert steps["converted"]["dtype"] == "torch.float8_e4m3fn"


def test_dynamic_vram_maps_by_itself(steps):
    assert steps["DynamicVRAM"] == {"ours": False}


def test_other_systems_are_left_alone(steps):
    assert steps["another system"] == {"ours": False}


def test_nothing_keeps_a_dropped_model(steps):
    assert steps["dropped"] == {"alive": False}


def test_comfyui_says_what_is_wrong_with_a_file(steps):
    stock, mapped = steps["broken"]["told"]
    assert stock == mapped


def test_free_memory_is_that_of_the_container(steps):
    assert steps["memory"] == {"machine": True, "here": True, "limited": [500, 500], "nothing_left": 0, "unlimited": True}
