"""Models whose blocks are compiled: the result is that of one process, and nothing is compiled that need not be.

Most cases are captured as a compiler would have them and run by torch itself (`eager`), because gcc takes long; all of them with
inductor, in every mode, are `benchmarks/compiled.py --matrix`. tests/server has inductor.
"""

import pytest
from support import families
from support.faults import SOAK

# ring degree, Ulysses degree, rotate method, batch degree, backend -> cases of families
RUNS = {
    "ulysses 2": (1, 2, "allgather", 1, "eager"),
    "batch 2 x ulysses 2": (1, 2, "allgather", 2, "eager"),
    "ring 2": (2, 1, "alltoall", 1, "eager"),
}


def names_of(family):
    return {case.name for case in families.load(family).CASES}


CASES = {
    "ulysses 2": [("flux", "flux 3 heads batch 2")],
    "batch 2 x ulysses 2": [("wan", "wan t2v batch 2 odd")],
}
if SOAK:
    CASES["ulysses 2"] += [("qwen_image", "qwen text mask"), ("minimax_music", "music two windows"), ("wan", "wan t2v")]
    CASES["ulysses 2"] += [("lumina", "z-image"), ("sd3", "sd3.5 medium"), ("ltxv", "ltxv")]
    CASES["ring 2"] = [("wan", "wan 3 heads")]
# What this ComfyUI has of them.
CASES = {run: [(family, case) for family, case in cases if case in names_of(family)] for run, cases in CASES.items()}
KEYS = [(run, *case) for run, cases in CASES.items() for case in cases]
SEVERAL_SIZES = ("music two windows",)  # its windows are of two sizes in the first call, so that a second one needs no more
TOLERANCE = 1e-5  # standard deviations


@pytest.mark.parametrize("key", KEYS, ids=" ".join)
def test_compiled_blocks_compute_what_one_process_does(key, run_cases):
    run, *case = key
    ring, ulysses, _, batches, _ = RUNS[run]
    reports = run_cases(run, "compiled_ranks.py", ring * ulysses * batches, *RUNS[run], timeout=600)
    report = reports[tuple(case)]
    assert report["kinds"]
    assert not report["failures"]
    assert max(report["differences"].values()) <= TOLERANCE, report["differences"]
    # Of one kind, at most one variant per kind of arguments (Z-Image and SD3 have two); none for a sibling. Once more for a second
    # size, and for none after that.
    graphs = dict(zip(report["differences"], report["graphs"], strict=True))
    first, again = graphs.pop("first"), graphs.pop("other size")
    assert 0 < first <= 2 * len(report["kinds"]) <= sum(report["kinds"].values())
    assert (0 if case[-1] in SEVERAL_SIZES else 1) <= again <= first
    assert not any(graphs.values()), f"compiled again for: {graphs}"
    assert report["breaks"] == 0
    assert reports[case[0], "removed"]["forwards"] == 0
