"""Inputs of quantised layers are rounded as in one process."""

from support.ranks import COMFY, run_ranks


def test_a_scale_of_the_whole_input_is_shared():
    result, compiled = run_ranks("weights/scale_ranks.py", 3, preload=COMFY)
    assert result["alone"] > 1e-3  # each rank by itself would round otherwise
    assert result["counts"] == {"all_reduce": 1}  # of one number, and none where the file has the scale
    assert result["together"] == result["from_file"] == result["after"] == 0
    assert (compiled["compiled"], compiled["left"]) == (0, ["Block"])  # ranks meet inside: such a block is not compiled
    # Experts without tokens on some ranks: three layers each for HiDream, which runs them on nothing, two for Hunyuan3D, which runs
    # none of them; and once more for those that all tokens share.
    assert result["experts"] == [[0, 5 * 3], [0, 5 * 2]]
