"""Inputs of quantised layers are rounded as in one process."""

import pytest
from support.ranks import COMFY, run_ranks


@pytest.mark.bits("every number is rounded by itself")
def test_a_scale_of_the_whole_input_is_shared():
    result, mixed, compiled = run_ranks("weights/scale_ranks.py", 3, preload=COMFY)
    assert result["alone"] > 1e-3  # each rank by itself would round otherwise
    assert result["counts"] == {"all_reduce": 1}  # of one number, and none where the file has the scale
    assert result["together"] == result["from_file"] == result["after"] == 0  # every number by itself, with one scale
    assert (compiled["compiled"], compiled["left"]) == (0, ["Block"])  # ranks meet inside: such a block is not compiled
    refused, *fine = result["experts"]
    assert refused.startswith("block.experts are experts in NVFP4, whose tokens")
    assert fine == ["", "", ""]  # where it is cast; FP8; not quantised
    # Among devices of which one casts, all cast.
    for kind, needs in (("nvfp4", "nvfp4"), ("float8_e4m3fn", "fp8")):
        found = mixed["mixed"][kind]
        assert found["formats"] == [["fp8", "mxfp8", "nvfp4"], [], [needs]]
        assert found["native"] > 1e-2 > 1e-4 > found["cast"]  # which rounds no input
        assert found["common"] == found["alone"] == found["again"] == 0
