"""Families on CUDA tensors, with fake CUDA devices (`support/stand_in`): every line of a sharded call that a card would run.

A card refuses operands on two devices, and what a CPU rank does in passing makes the host wait for it.
"""

import pytest
from support import families
from support.faults import SOAK
from support.ranks import run_ranks

from cp_runtime.families import PLANS

FEW = {"ulysses 2": "flux", "ring 2": "wan"}
"""Families whose first case `make test` has; the soak has all cases, in the modes by turns."""
MODES = {"ulysses 2": (1, 2, "allgather", 0), "ring 2": (2, 1, "alltoall", 0)}
STAGES = {"3 stages": (1, 1, "allgather", 3), **({"2 stages": (1, 1, "allgather", 2)} if SOAK else {})}


def mode_of(turn, number):
    return list(MODES)[(turn + number) % len(MODES)]


CASES = {
    (mode, family, case.name): case
    for turn, family in enumerate(families.NAMES)
    for number, case in enumerate(families.load(family).CASES)
    for mode in MODES
    if PLANS[families.load(family).MODELS[case.model].cls].shares_sequence
    and (mode == mode_of(turn, number) if SOAK else number == 0 and family == FEW[mode])
}
# The clock of a rank that has run for long: it looks at an event of 512 collectives ago.
ADDED_UP = "event, cp_runtime/engine/ranks/collectives.py: self._events[KEPT_EVENTS // 2][1].synchronize()"


@pytest.mark.parametrize("key", CASES, ids="-".join)
def test_sharded_calls_on_cards_make_no_host_wait(key, run_cases):
    mode, *case = key
    options = {"timeout": 1200 if SOAK else 300, "device": "cuda", "backend": "nccl"}
    result = run_cases(mode, "card_ranks.py", 2, *MODES[mode], **options)[tuple(case)]
    assert result["device"] == "cuda:0"
    assert result["difference"] <= CASES[key].tolerance
    assert result["waits"].keys() <= {ADDED_UP}
    assert not result["order"]


# Blocks beside blocks, some of which skip stages, and a model that has no patches: a stage sends to others than the next one.
@pytest.mark.parametrize(
    "key", [(mode, *case) for mode in STAGES for case in (("wan", "vace contexts batch 2"), ("triposplat", "triposplat batch 2"))]
)
def test_stages_send_in_one_order(key, run_cases):
    """NCCL has one per group for messages of two ranks: one that waits for its sender holds back what comes behind it."""
    mode, family, case = key
    stages = STAGES[mode][-1]
    result = run_cases(mode, "card_ranks.py", stages, *STAGES[mode], device="cuda", backend="nccl")[family, case]
    assert result["difference"] <= families.case(family, case).tolerance
    assert not result["order"]


def test_a_vae_on_rows_makes_no_host_wait():
    (report,) = run_ranks("families/card_rows_ranks.py", 3, timeout=90, device="cuda", backend="nccl")
    assert report["difference"] <= 1e-5
    assert report["waits"] == [[]] * 3
