"""Injected faults, for tests: inert unless CP_TEST_FAULT names a file (docs/testing.md).

The file holds `{"rank": 1, "module": 3, "kind": "oom"}`. The rank removes it and fails when it enters that planned module. Kind
`slow` sleeps for `seconds` at that module and every later one instead.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

FAULT_FILE = os.environ.get("CP_TEST_FAULT", "")


def armed_fault(rank: int) -> Callable[[int], None] | None:
    """Return a function of the module number that fails when its turn comes, if a fault is waiting for `rank`."""
    if not FAULT_FILE:
        return None
    path = Path(FAULT_FILE)
    try:
        fault = json.loads(path.read_text())
    except FileNotFoundError:  # none, or the rank that it is for was faster
        return None
    if fault["rank"] != rank:
        return None
    path.unlink()

    def fail(module: int) -> None:
        if fault["kind"] == "slow":
            time.sleep(fault["seconds"] if module >= fault["module"] else 0)
        elif module == fault["module"]:
            if fault["kind"] == "oom":
                raise torch.OutOfMemoryError("injected: CUDA out of memory. Tried to allocate 20.00 GiB.")
            raise RuntimeError(f"injected: {fault['kind']}")

    return fail
