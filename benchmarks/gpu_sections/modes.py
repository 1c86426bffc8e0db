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

from .section import Section

ATTENTION = ROOT / "tests" / "ranks" / "attention"
HEAD_DIM = 128
LARGEST, HALF = 2e-5, 1.2


def run(section: Section) -> None:
    """A result per number of ranks and mode."""
    for world in (2,) if section.few else (2, 3):
        with section.part(f"{world} ranks"):
            compare(section, world, 13 if section.few and section.rehearse else 1, device=section.device)


def compare(section: Section, world: int, every: int, **place: str) -> None:
    """A result per mode.

    Args:
        every: leave out all but every how many-th case.
        place: device and backend, see `run_ranks`.
    """
    reports = run_ranks(ATTENTION / "attention_ranks.py", world, str(HEAD_DIM), str(every), **place)
    modes: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for report in reports:
        modes[report["mode"]].append(report)
    for mode, cases in modes.items():
        largest = max(case["difference"] for case in cases if case["dtype"] == "float32")
        halves = [case for case in cases if case["dtype"] != "float32"]
        half = math.sqrt(sum(case["rms"] ** 2 for case in halves) / sum(case["one_process_rms"] ** 2 for case in halves))
        good = largest <= LARGEST and half <= HALF and all(case["finite"] for case in cases)
        section.check(f"{world} ranks, {mode}", good, cases=len(cases), largest=largest, half_rms=half)
