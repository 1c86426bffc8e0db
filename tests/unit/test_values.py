"""A model by value: where its weights are, when it is another one, and what a rank has of it."""

from pathlib import Path

import pytest
from support.ranks import COMFY, run_steps


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_steps(Path(__file__).with_name("values_ranks.py"), 1, str(tmp_path_factory.mktemp("model")), preload=COMFY)


def test_private_weights_move_into_one_segment(seen):
    found = seen["private weights"]
    assert found.pop("blocks") == [False]
    assert not found.pop("training")
    assert {name for name, good in found.items() if good is not True} == set()
    assert seen["a rank writes"]["alone"]


def test_what_changes_travels(seen):
    changes = {name: report for name, report in seen.items() if report.get("change")}
    assert len(changes) == 7
    assert {name: (report["new"], report["same"]) for name, report in changes.items()} == dict.fromkeys(changes, (True, True))
    assert changes["an attribute"]["scale"] == 4


def test_weights_that_were_on_a_device_meanwhile_are_the_same(seen):
    assert seen["elsewhere and back"]["same_value"]
    assert seen["elsewhere and back"]["moved"]
    assert seen["elsewhere and back"]["blocks"] == 1


def test_a_weight_that_is_replaced_for_a_while_leaves_the_first_one_alone(seen):
    found = seen["replaced and put back"]
    assert (found["replaced"], found["intact"], found["back"]) == (True, True, True)


def test_ranks_get_weights_as_they_were_before_comfyui_patched_them(seen):
    assert (seen["patched here"]["rank_has"], seen["patched here"]["here"]) == (1.0, 2.0)


def test_pages_of_a_file_stay_there_unless_they_were_written_to(seen):
    assert seen["a file's pages"]["blocks"][0] is True
    assert (seen["a file's pages"]["moved"], seen["a file's pages"]["same"]) == (False, True)
    assert sorted(seen["written pages"]["blocks"]) == [False, True]
    assert seen["written pages"]["same"]


def test_a_file_in_a_folder_that_is_a_link(seen):
    assert seen["a folder that is a link"]["found"] == ["cp_test", "model.safetensors"]


WORDS = {
    "hook": "a node put a hook on norm",
    "method": "a node replaced forward of norm",
    "object": "lock of the model, an object of the class _thread.lock, cannot be sent to the workers",
    "dropout": "a node put drop into training mode",
}


@pytest.mark.parametrize("name", WORDS)
def test_what_cannot_travel_is_named(seen, name):
    assert WORDS[name] in seen[f"refused, {name}"]["words"]
