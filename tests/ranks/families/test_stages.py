"""Models in stages: bit-equal to one device, and in patches equal to it where the inputs are those of the call before.

One case with a rank per stage and one with two; all cases of all families with CP_SOAK=1.
"""

import pytest
from support import families
from support.faults import SOAK

from cp_runtime.families import PLANS

# stages, ranks of each stage, batch degree, patches
MODES = {
    "2 stages": (2, 1, 1, 3),
    "3 stages": (3, 1, 1, 4),
    "2 stages x ulysses 2": (2, 2, 1, 2),
    "2 stages x batch 2": (2, 2, 2, 2),
}
FEW = {"2 stages": "flux", "2 stages x ulysses 2": "qwen_image"}
DEEP = ("flux", "unet")  # with a block for each of three stages
ELSEWHERE = ("ace_step15",)  # these differ by rounding on one rank, too


def applies(mode, family, number, case):
    """Whether a case, the `number`th of its family, runs in that mode."""
    plan = PLANS[families.load(family).MODELS[case.model].cls]
    if plan.unstaged:
        return False
    if SOAK:
        return mode != "3 stages" or family in DEEP
    return number == 0 and family == FEW.get(mode)


CASES = {
    (mode, family, case.name): case
    for mode in MODES
    for family in families.NAMES
    for number, case in enumerate(families.load(family).CASES)
    if applies(mode, family, number, case)
}
REFUSED = {
    "nothing can stand in for a part of it": ("triposplat", "unet", "yue2"),
    "some tokens stay whole on every rank": ("hidream", "hunyuan_video", "mochi", "pixeldit"),  # with several ranks in a stage
}


@pytest.mark.bits("one rank per stage runs whole blocks on whole tokens")
@pytest.mark.parametrize("key", CASES, ids="-".join)
def test_a_model_in_stages(key, run_cases):
    mode, family, case = key
    stages, ranks, batches, patches = MODES[mode]
    time = 1800 if SOAK else 300
    result = run_cases(mode, "stage_ranks.py", stages * ranks, stages, batches, patches, timeout=time)[family, case]
    alone = result["parts"] == 1 and ranks == 1 and family not in ELSEWHERE  # not item by item, nor by tokens
    if result["refused"]:
        assert any(why in result["refused"] and family in refused for why, refused in REFUSED.items())
    if not result["refused"] or ranks == 1:  # a rank per stage
        assert result["exact"] <= (0 if alone else CASES[key].tolerance)
    assert result.get("filling", 0) <= CASES[key].tolerance
    assert max(result.get("patches", 0), result.get("again", 0)) <= CASES[key].tolerance
    if "again" in result:  # what it receives was asked for before its first block, most of it in the run before
        assert result["asked"] == [0]
    assert (result["pending"], result["forwards"]) == (0, 0)
