"""What a rank's models take of its memory."""

import pytest
from support.ranks import COMFY, run_steps


@pytest.fixture(scope="module", params=["shared", "file"])
def at(request, flux):
    """Reports by step, where ComfyUI's process has the weights in memory of its own at first, or in pages of the file."""
    return run_steps("weights/memory_ranks.py", 1, flux[0], request.param, preload=COMFY) | {"place": request.param}


def test_weights_leave_the_device_for_the_pages_of_comfyuis_process(at):
    """N ranks with a copy each would take N times the model's size of the computer's memory."""
    total = at["read"]["common"]
    assert total > 1e6
    whole = {"device": total, "common": 0, "private": 0}
    in_file = at["read"].pop("in_file")
    assert in_file > 0.95 * total if at["place"] == "file" else in_file == 0
    assert at["read"] == {"device": 0, "common": total, "private": 0, "of_comfyui": total}
    assert at["on the device"] == at["with a LoRA"] == at["with another LoRA"] == at["back on the device"] == whole
    assert at["half of it makes room"]["device"] > 0
    assert at["half of it makes room"]["private"] == 0
    assert at["all of it makes room"] == {"device": 0, "common": total, "private": 0, "listed": 0}


@pytest.mark.parametrize("step", ["progress", "progress with a LoRA"])
def test_progress_rises_from_nothing_to_all_of_the_model(at, step):
    assert at[step] == {"first": 0, "last": 1000, "steps": True, "rises": True, "end": None}


def test_a_dropped_model_is_gone(at):
    assert at["dropped"] == {"freed": [True], "listed": 0}


def test_a_larger_call_gets_its_room(at):
    """What was planned for a smaller call is not enough; what a larger one needed is not kept from the weights for good."""
    assert at["small"]["device"] == at["read"]["common"]
    assert at["large"]["free"] >= 1.6
    assert at["large"]["device"] > 0
    assert at["large"]["private"] == 0
    assert at["smaller again"] == at["large"]  # calls of one run alternate between sizes
    assert at["small again"] == at["small"]


def test_weights_that_can_give_way_are_room_for_a_call(at):
    """Else a sampler would compute CFG halves one after the other as soon as the first call has brought the weights."""
    assert {at[call]["room"] for call in ("small", "large", "small again")} == {2.0}


def test_conditions_count(at):
    """A reference of three times the latent's size makes a call need four times the memory."""
    assert at["conditions"]["scales"] == pytest.approx([1.0, 4.0])
