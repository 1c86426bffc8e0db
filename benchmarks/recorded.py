"""What every benchmark measured last, beside what it measures now: which ratios moved.

    make bench, or python benchmarks/recorded.py [--quick] [--record]

Runs the benchmarks one after the other and compares every ratio that they note with `recorded.json`. Both sides of a ratio are
measured in one run, so ratios can be compared between runs and, with care, between machines. Seconds cannot, and are not kept.
`--record` keeps the new ratios; those that no benchmark measures any more go.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import common
from common import NOTES

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "recorded.json"
BENCHMARKS = ("call_overhead", "memory", "attention", "flux_step", "batch", "sharded", "compiled", "shares", "vae", "upscale")
TAKE_QUICK = ("attention", "flux_step", "batch", "sharded", "compiled", "vae", "upscale")
MOVED = 0.05  # share of a ratio; below it is the noise of these machines


def compare(recorded: dict[str, float], now: dict[str, float]) -> list[str]:
    """A line for each ratio that moved or was not there before, in the order of the benchmarks."""
    lines = []
    for name, ratio in now.items():
        before = recorded.get(name)
        if before is None:
            lines.append(f"{name}: {ratio:.3f}, not recorded before")
        elif abs(ratio / before - 1) > MOVED:
            lines.append(f"{name}: {before:.3f} -> {ratio:.3f} ({ratio / before - 1:+.0%})")
    return lines


def run(quick: bool) -> dict[str, float]:
    """The ratios of all benchmarks, by name."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as notes:
        for name in BENCHMARKS:
            print(f"\n=== {name}", flush=True)
            options = ["--quick"] if quick and name in TAKE_QUICK else []
            subprocess.run([sys.executable, str(HERE / f"{name}.py"), *options], env={**os.environ, NOTES: notes.name}, check=True)
        return dict(json.loads(line) for line in notes)


def main() -> None:
    options = common.options(
        __doc__, "short sequences and few repetitions: minutes", record={"default": False, "help": "keep the new ratios"}
    )
    recorded = json.loads(RECORDED.read_text())
    now = run(options.quick)
    moved = compare(recorded["ratios"], now)
    print(f"\n=== against {recorded['date']} ({recorded['machine']}, torch {recorded['torch']})")
    print("\n".join(moved) or f"none of {len(now)} ratios moved by more than {MOVED:.0%}")
    if options.record:
        now = {**recorded["ratios"], **now} if options.quick else now
        kept = {"date": datetime.date.today().isoformat(), **common.machine(), "ratios": now}
        RECORDED.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
