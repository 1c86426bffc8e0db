"""Who holds memory of a device that ranks share with ComfyUI's process, a test per row of the table in `comfy/ui/residency`;
and what a sampler takes for free memory."""

import pytest
from support.ranks import COMFY, run_steps

RANKS, STOCK = "ContextParallelPatcher", "ModelPatcher"


@pytest.fixture(scope="module")
def steps(flux):
    return run_steps("weights/residency_ranks.py", 1, flux[0], preload=COMFY)


def test_what_torch_keeps_is_given_back_before_ranks_load(steps):
    assert steps["ranks load"]["told"] == ["empty cache", "load"]
    assert steps["ranks load again"]["told"] == ["empty cache", "load"]
    assert steps["ranks load"]["listed"] == steps["ranks load again"]["listed"] == [RANKS]


def test_pages_of_dynamic_vram_are_given_back_before_ranks_load(steps):
    assert steps["ranks load behind DynamicVRAM"]["told"] == ["empty cache", "load"]
    assert steps["left of DynamicVRAM"] == {"pages": 0, "on_modules": [], "pinned": 0}


def test_a_model_that_lives_on_the_device_leaves_it_before_ranks_load(steps):
    assert steps["ranks load behind --highvram"]["weights"] == ["cpu"]
    assert steps["ranks load behind --highvram"]["told"][-2:] == ["empty cache", "load"]


@pytest.mark.parametrize("step", ["loaded without ranks", "Apply is removed"])
def test_ranks_drop_a_model_before_comfyui_loads_it_without_them(steps, step):
    assert steps[step]["told"] == ["unload"]
    assert steps[step]["listed"] == [STOCK]


def test_ranks_keep_a_model_that_is_loaded_onto_another_device(steps):
    assert steps["loaded on a device without a rank"]["told"] == []


def test_the_size_of_a_model_is_what_it_takes_of_this_process_s_device(steps):
    sizes = steps["sizes"]
    assert (sizes["sharded"], sizes["on other devices"]) == (sizes["whole"] // 2, 0)


def test_a_clone_that_runs_on_one_device_is_as_large_as_the_model(steps):
    """ComfyUI writes the size of what it clones into the clone."""
    sizes = steps["sizes"]
    assert sizes["clone_on_one_device"] == sizes["removed"] == sizes["whole"]


def test_a_model_that_is_left_on_one_device_has_no_ranks_of_an_earlier_apply(steps):
    assert steps["applied again"]["kind"] == STOCK


def test_a_forward_that_is_called_by_keywords_is_sent(steps):
    assert steps["called by keywords"]["sent"] == [[["x", "timestep"], "cpu"]]


def test_comfyui_frees_what_does_not_sample_where_a_rank_has_no_memory_left(steps):
    assert steps["a rank has no memory left"]["told"] == ["empty cache"]
    assert steps["freed"]["freed"] == [["cpu", [True]]]


TOGETHER, ONE_BY_ONE = [2], [1, 1]


def test_a_sampler_batches_cfg_halves_as_the_memory_of_the_ranks_allows(steps):
    """What ComfyUI's process sees of rank 0's device is what rank 0's cache leaves."""
    assert steps["halves at once"] == {
        "before_a_call": TOGETHER,
        "cpu_ranks": TOGETHER,
        "enough": TOGETHER,
        "one_rank_has_less": ONE_BY_ONE,
        "ranks_share_a_device": ONE_BY_ONE,
        "more_ranks": TOGETHER,
    }


def test_ranks_of_a_unet_share_the_halves_and_nothing_else(steps):
    assert steps["halves at once, UNet"] == {"enough": TOGETHER, "less": ONE_BY_ONE}


def test_devices_have_names_that_people_know(steps):
    assert steps["devices"] == {
        "cuda": [{"name": f"cuda:{i}", "title": f"RTX {i + 3}090", "memory": 24 << 30} for i in range(2)],
        "ranks": ["cuda:0", "cuda:1"],
    }


def test_a_device_with_less_free_than_comfyui_keeps_has_no_room(steps):
    """A message with a number of bytes below 0 is refused, and with it the prompt (`--reserve-vram`)."""
    assert steps["less free than ComfyUI keeps"]["available"] == 0
