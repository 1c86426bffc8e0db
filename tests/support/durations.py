"""How long tests took: per folder, per file, and the slowest of them.

Every run of pytest ends with the table. Where CP_TEST_DURATIONS names a file, the figures are appended to it instead, and whoever
started several runs prints one table of all (`.ci/lanes.py`).
"""

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

FILE = os.environ.get("CP_TEST_DURATIONS", "")
SLOWEST = 25
SHORT = 1.0
"""Seconds below which a file or a test has no line of its own."""

_seconds: dict[str, float] = defaultdict(float)


def note(test: str, seconds: float) -> None:
    """Add the duration of a test's fixtures or of its call."""
    _seconds[test] += seconds


def finish() -> list[str]:
    """The table of this run; no lines where the figures go to a file."""
    if not FILE:
        return table(_seconds)
    with Path(FILE).open("a", encoding="utf-8") as out:
        out.write(json.dumps(_seconds) + "\n")
    return []


def read(file: Path) -> dict[str, float]:
    """Seconds by test, of all runs that wrote to a file."""
    seconds: dict[str, float] = defaultdict(float)
    for line in file.read_text(encoding="utf-8").splitlines():
        for test, value in json.loads(line).items():
            seconds[test] += value
    return seconds


def table(seconds: Mapping[str, float]) -> list[str]:
    """Lines of text: folders with their files, the slowest tests. Fixtures count for the test that they were made for."""
    files: dict[str, float] = defaultdict(float)
    folders: dict[str, float] = defaultdict(float)
    for test, value in seconds.items():
        file = test.partition("::")[0]
        files[file] += value
        folders[str(Path(file).parent)] += value
    lines = ["Time per folder and file:"]
    for folder, value in longest(folders):
        lines.append(f"{value:8.1f} s  {folder}")
        inside = [(name, spent) for name, spent in longest(files) if str(Path(name).parent) == folder and spent >= SHORT]
        lines += [f"{spent:12.1f} s  {Path(name).name}" for name, spent in inside]
    slow = [(test, value) for test, value in longest(seconds)[:SLOWEST] if value >= SHORT]
    if slow:
        lines += ["The slowest tests:", *(f"{value:8.1f} s  {test}" for test, value in slow)]
    return lines


def longest(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """The entries, the longest first."""
    return sorted(seconds.items(), key=lambda entry: -entry[1])
