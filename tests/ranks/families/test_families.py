"""Every family and feature: the sharded forward equals the stock forward in one process. Tolerances: docs/numerics.md."""

import json

import pytest
import torch
from support import families
from support.faults import SOAK

from cp_runtime.families import PLANS

# ring degree, ulysses degree, rotate_method, batch degree, shares
MODES = {
    "ulysses 2": (1, 2, "allgather", 1, ()),
    "ring 3": (3, 1, "alltoall", 1, ()),
    "batch 2 x ulysses 2": (1, 2, "allgather", 2, (2, 2, 1, 1)),
    "ulysses 3": (1, 3, "allgather", 1, (4, 2, 1)),
    "ring 2": (2, 1, "allgather", 1, (3, 1)),
    "unified 4": (2, 2, "alltoall", 1, ()),
}
# Attention is tested in every mode by test_attention.py; here the plans are, by turns at 2 and 3 ranks, and some by turns in the
# other modes; all of these in all of them with CP_SOAK=1.
PLAN_MODES = ("ulysses 2", "ring 3")
EVERY_MODE = ("flux", "qwen_image", "qwen_image21", "wan")
COUNTED = "wan t2v"  # its collectives are, in every mode
SAME_SHARES = pytest.mark.bits("the same shares of tokens, with whole weights or parts")


def applies(mode, family, number, case):
    """Whether a case, the `number`th of its family, runs in that mode: its ranks must have something to share."""
    plan = PLANS[families.load(family).MODELS[case.model].cls]
    batches = MODES[mode][3]
    if batches == 1:
        turn = SOAK or case.name == COUNTED or (mode not in PLAN_MODES and number % len(MODES) == list(MODES).index(mode))
        return plan.shares_sequence and (mode == PLAN_MODES[number % 2] or (family in EVERY_MODE and turn))
    arguments = case.make()
    items = next(value.shape[0] for value in arguments.values() if isinstance(value, torch.Tensor))
    if items % batches or not plan.batch_is_shared({**arguments, "transformer_options": case.options}):
        return False
    return SOAK or not plan.shares_sequence or number % 2 == 0


CASES = {
    (mode, family, case.name): case
    for mode in MODES
    for family in families.NAMES
    for number, case in enumerate(families.load(family).CASES)
    if applies(mode, family, number, case)
}
SHARED = {}
"""In which mode a model has its weights shared out: the first one that it runs in."""
for mode, family, name in CASES:
    SHARED.setdefault((family, CASES[mode, family, name].model), mode)


@pytest.fixture
def reports_of(selected, run_cases):
    """One run of ranks per mode, over the families that were selected."""
    names = {"wan", *(p["key"][1] if "key" in p else p["family"] for p in selected if p.keys() & {"key", "family"})}

    def reports(mode):
        ring, ulysses, rotate_method, batches, shares = MODES[mode]
        wanted = [key[1:] for key in CASES if key[0] == mode and key[1] in names]
        shared = [model for model in SHARED if SHARED[model] == mode and model[0] in names]
        arguments = (ring, ulysses, rotate_method, batches, json.dumps(shares), json.dumps(shared))
        return run_cases(mode, "family_ranks.py", ring * ulysses * batches, *arguments, wanted=wanted, timeout=600)

    return reports


@pytest.mark.parametrize("key", CASES, ids="-".join)
def test_sharded_forward_equals_stock_forward(key, reports_of):
    mode, family, case = key
    result = reports_of(mode)[family, case]
    assert result["std"] > 1e-2
    assert result["difference"] <= CASES[key].tolerance
    assert result["collectives"] > bool(result["lengths"])  # attention and the output; or the output alone
    for name, difference in result["matters"].items():
        assert difference > 1e-2, f"{name} does not matter"


@pytest.mark.parametrize(
    ("family", "model"), [pytest.param(*key, marks=[SAME_SHARES] if key[0] in EVERY_MODE else []) for key in SHARED]
)
def test_weights_of_which_every_rank_keeps_a_part(family, model, reports_of):
    """The bytes are the bytes: no difference at all, in a call that fetches block after block and in one that fetches ahead."""
    result = reports_of(SHARED[family, model])[family, f"weights of {model}"]
    assert result["blocks"] > 0
    assert (result["differing"], result["pending"]) == (0, 0)


@pytest.mark.parametrize(("family", "model"), SHARED)
def test_eight_bits_are_near(family, model, reports_of):
    result = reports_of(SHARED[family, model])[family, f"weights of {model}"]
    assert result["eight_bits"] <= 0.03


@pytest.mark.parametrize("mode", [mode for mode in MODES if MODES[mode][3] == 1])
def test_cross_attention_to_replicated_text_costs_nothing(mode, reports_of):
    """Two blocks with self- and cross-attention: two shared attentions, and the output is gathered."""
    expected = {
        "ulysses 2": {"all_to_all": 4, "all_gather": 1},
        "ulysses 3": {"all_to_all": 4, "all_gather": 1},
        "ring 2": {"all_gather": 3},
        "ring 3": {"exchange": 4, "all_gather": 1},
        "unified 4": {"all_to_all": 4, "exchange": 2, "all_gather": 1},
    }
    assert reports_of(mode)["wan", COUNTED]["counts"] == expected[mode]


@pytest.mark.parametrize("mode", MODES)
def test_removed_plans_leave_no_hooks(mode, reports_of):
    assert all(r["hooks"] == 0 for (_, case), r in reports_of(mode).items() if case == "removed")


@pytest.mark.parametrize("mode", MODES)
def test_calls_are_not_taken_for_changes(mode, reports_of):
    """Not in the code that a model computes with, nor in what its modules hold."""
    assert [change for (_, case), r in reports_of(mode).items() if case == "removed" for change in r["changes"]] == []
