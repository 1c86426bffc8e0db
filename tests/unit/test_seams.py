"""Seams that moved in newer versions of ComfyUI: each fails here if the next one moves it again."""

from pathlib import Path

import pytest
from support import families
from support.ranks import COMFY, run_ranks

CONTAINER = "AttentionTensorContainer"


@pytest.fixture(scope="module")
def found():
    (report,) = run_ranks(Path(__file__).with_name("seams_ranks.py"), 1, preload=COMFY)
    return report


@pytest.mark.bits("the same attention")
def test_a_function_gets_containers_where_nothing_is_exchanged(found):
    name = CONTAINER if found["has containers"] else "StandIn"
    assert found["has containers"] == families.exists("0.32.0")
    assert found["containers"] == {
        "local": {"equal": True, "given": [[name] * 3], "left": [False] * 3},
        "plain": {"equal": True, "given": ["tensors"], "left": [False] * 3},
        "shared": {"equal": True, "given": ["tensors"], "left": [False] * 3},
    }


def test_comfyui_records_neither_a_rank_s_forward_nor_a_call_of_the_workers(found):
    there = {"disable_cuda_graphs": families.exists("0.33.0"), "disable_comfy_compiler": families.exists("0.34.0")}
    assert {name: value is not None for name, value in found["before"].items()} == there
    assert set(found["in a call"].values()) == {True} == set(found["on a rank"].values())
    assert set(found["after a call"].values()) == {False}
    assert found["aimdo on a rank"] is False
