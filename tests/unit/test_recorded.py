"""`make bench` says which ratios moved since they were recorded."""

import json
import re
import sys

from support.package import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import common
import recorded


def test_what_moved_is_said():
    before = {"steady": 1.5, "faster": 1.5, "slower": 1.5, "not measured now": 1.0}
    lines = recorded.compare(before, {"steady": 1.52, "faster": 1.8, "slower": 1.2, "new": 2.0})
    assert lines == ["faster: 1.500 -> 1.800 (+20%)", "slower: 1.500 -> 1.200 (-20%)", "new: 2.000, not recorded before"]


def test_a_benchmark_notes_its_ratios(tmp_path, monkeypatch):
    common.note("alone", 1.0)  # nothing listens
    notes = tmp_path / "notes"
    monkeypatch.setenv(common.NOTES, str(notes))
    common.note("attention", 1.23456)
    common.note("step", 2.0)
    assert [json.loads(line) for line in notes.read_text().splitlines()] == [["attention", 1.2346], ["step", 2.0]]


def test_the_recorded_ratios_are_of_benchmarks_that_exist():
    kept = json.loads(recorded.RECORDED.read_text())
    assert kept["ratios"]
    assert {name.partition(",")[0].replace(" ", "_") for name in kept["ratios"]} <= set(recorded.BENCHMARKS)


def test_a_ratio_begins_with_the_name_of_its_benchmark():
    """Or what `--record` keeps would not be of a benchmark that exists."""
    for name in recorded.BENCHMARKS:
        noted = re.findall(r'note\(f?"([^"{,]*)', (recorded.HERE / f"{name}.py").read_text())
        assert {each.replace(" ", "_") for each in noted if each} <= {name}
