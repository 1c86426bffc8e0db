"""`make bench` says which ratios moved since they were recorded."""

import json
import runpy

from support.package import ROOT

recorded = runpy.run_path(str(ROOT / "benchmarks" / "recorded.py"))


def test_what_moved_is_said():
    before = {"steady": 1.5, "faster": 1.5, "slower": 1.5, "not measured now": 1.0}
    lines = recorded["compare"](before, {"steady": 1.52, "faster": 1.8, "slower": 1.2, "new": 2.0})
    assert lines == ["faster: 1.500 -> 1.800 (+20%)", "slower: 1.500 -> 1.200 (-20%)", "new: 2.000, not recorded before"]


def test_a_benchmark_notes_its_ratios(tmp_path, monkeypatch):
    recorded["note"]("alone", 1.0)  # nothing listens
    notes = tmp_path / "notes"
    monkeypatch.setenv(recorded["NOTES"], str(notes))
    recorded["note"]("attention", 1.23456)
    recorded["note"]("step", 2.0)
    assert [json.loads(line) for line in notes.read_text().splitlines()] == [["attention", 1.2346], ["step", 2.0]]


def test_the_recorded_ratios_are_of_benchmarks_that_exist():
    kept = json.loads(recorded["RECORDED"].read_text())
    assert kept["ratios"]
    assert {name.partition(",")[0].replace(" ", "_") for name in kept["ratios"]} <= set(recorded["BENCHMARKS"])
