"""The matrix of attention cases of tests/ranks, on real ranks that share the device over gloo, with heads of 128.

`largest` is that of float32, against one process; `half rms` is the error of half precision over all cases, relative to that of one
process.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from support.package import ROOT
from support.ranks import run_ranks

from .options import Options
from .results import Results

ATTENTION = ROOT / "tests" / "ranks" / "attention"

HEAD_DIM = 128
WORLDS = (2, 3)
LARGEST, HALF = 2e-5, 1.2


def run(options: Options, results: Results) -> None:
    """A result per number of ranks and mode."""
    for world in WORLDS[:1] if options.few else WORLDS:
        with results.part(f"{world} ranks"):
            compare(world, results, device=options.device, every=13 if options.few and options.rehearse else 1)


def compare(world: int, results: Results, *, device: str, backend: str = "gloo", every: int = 1) -> None:
    """A result per mode.

    Args:
        device: see `run_ranks`.
        every: leave out all but every how many-th case.
    """
    arguments = str(HEAD_DIM), str(every)
    reports = run_ranks(ATTENTION / "attention_ranks.py", world, *arguments, timeout=240, device=device, backend=backend)
    modes: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for report in reports:
        modes[report["mode"]].append(report)
    for mode, cases in modes.items():
        largest = max(case["difference"] for case in cases if case["dtype"] == "float32")
        halves = [case for case in cases if case["dtype"] != "float32"]
        half = math.sqrt(sum(case["rms"] ** 2 for case in halves) / sum(case["one_process_rms"] ** 2 for case in halves))
        good = largest <= LARGEST and half <= HALF and all(case["finite"] for case in cases)
        results.check(f"{world} ranks, {mode}", good, cases=len(cases), largest=largest, half_rms=half)
