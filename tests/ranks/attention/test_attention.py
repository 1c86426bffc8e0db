"""Context-parallel attention on real ranks equals attention in one process, in every mode. Tolerances: docs/numerics.md."""

import sys
from pathlib import Path

import pytest
from support.ranks import run_ranks

HERE = Path(__file__).parent
sys.path.append(str(HERE))
from attention_cases import cases, modes  # noqa: E402

MERGING = ("ring alltoall", "unified alltoall")


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    return request.param, run_ranks("attention/attention_ranks.py", request.param)


def test_every_case_ran(ranks):
    world, reports = ranks
    assert [r["case"] for r in reports] == [case.name for case in cases(world)]
    assert {r["mode"] for r in reports} == set(modes(world))
    assert all(r["finite"] for r in reports)


def test_float32_is_exact(ranks):
    wrong = [r for r in ranks[1] if r["dtype"] == "float32" and not r["difference"] <= 1e-5]
    assert wrong == []


def test_eight_bits_are_near(ranks):
    """Root mean square of the result. In ring and unified the own keys are exact."""
    coded = {mode: [r["coded"] for r in ranks[1] if r["mode"] == mode and r["coded"]] for mode in modes(ranks[0])}
    assert all(coded.values())
    assert max(map(max, coded.values())) <= 0.03, coded
    assert min(map(max, coded.values())) >= 1e-3, coded


def test_masks_matter(ranks):
    """A mask that is dropped or misplaced is seen: leaving it out changes the result by much more than the tolerance."""
    changed = [r["mask_matters"] > 1e-2 for r in ranks[1] if r["mask"] not in (None, "ones") and r["dtype"] == "float32"]
    assert sum(changed) > 0.8 * len(changed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_far_from_float32_as_one_process(ranks, dtype):
    """Root mean square over all cases of a mode. A ring rounds once more, each part of the output: at most by sqrt(2)."""
    squares = {}
    for r in ranks[1]:
        if r["dtype"] == dtype:
            ours, theirs = squares.get(r["mode"], (0.0, 0.0))
            squares[r["mode"]] = (ours + r["rms"] ** 2, theirs + r["one_process_rms"] ** 2)
    ratios = {mode: (ours / theirs) ** 0.5 for mode, (ours, theirs) in squares.items()}
    assert ratios.keys() == {*modes(ranks[0])}
    for mode, ratio in ratios.items():
        assert ratio <= (1.2 if mode in MERGING else 1.01), ratios


def test_collectives_per_attention(ranks):
    """2 for packed Ulysses, R - 1 exchanges for a ring, and one more for a mask that every rank knows in part."""
    world, reports = ranks
    expected = {
        "ulysses": {"all_to_all": 2},
        "ulysses separate": {"all_to_all": 4},
        "ring alltoall": {"exchange": world - 1},
        "ring allgather": {"all_gather": 1},
        "unified alltoall": {"all_to_all": 2, "exchange": 1},
        "unified allgather": {"all_to_all": 2, "all_gather": 1},
    }
    for r in reports:
        more = {"all_gather": 1} if r["mask"] == "local keys" else {}
        got = dict(r["counts"])
        for kind, count in more.items():
            got[kind] -= count
        assert {k: n for k, n in got.items() if n} == expected[r["mode"]], r["case"]
