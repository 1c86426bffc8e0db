"""`make bench` says which ratios moved since they were recorded."""

import json
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
    common.show("alone", {"ratio": 1.0})  # nothing listens
    notes = tmp_path / "notes"
    monkeypatch.setenv(common.NOTES, str(notes))
    monkeypatch.setattr(sys, "argv", [str(recorded.HERE / "flux_step.py")])
    common.show("ours", {"ratio": 1.23456, "memory": 2.0}, seconds=3.0)
    kept = [["flux step, ours, ratio", 1.2346], ["flux step, ours, memory", 2.0]]
    assert [json.loads(line) for line in notes.read_text().splitlines()] == kept


def test_the_recorded_ratios_are_of_benchmarks_that_exist():
    kept = json.loads(recorded.RECORDED.read_text())
    assert kept["ratios"]
    assert {name.partition(",")[0].replace(" ", "_") for name in kept["ratios"]} <= set(recorded.BENCHMARKS)


def test_a_ratio_begins_with_the_name_of_its_benchmark(tmp_path, monkeypatch):
    """Or what `--record` keeps would not be of a benchmark that exists."""
    for name in recorded.BENCHMARKS:
        program = recorded.HERE / f"{name}.py"
        assert program.exists()
        monkeypatch.setenv(common.NOTES, str(tmp_path / name))
        monkeypatch.setattr(sys, "argv", [str(program)])
        common.show("case", {"ratio": 1.0})
        ((noted, _),) = map(json.loads, (tmp_path / name).read_text().splitlines())
        assert noted.partition(",")[0].replace(" ", "_") == name


def test_an_option_takes_kind_and_number_of_its_values_from_its_default():
    words = {"choices": ("a", "b"), "default": ("a", "b")}
    added = {"many": [1], "words": words, "flag": False, "two_words": 1.5, "none": {"type": int, "help": "of no default"}}
    found = common.options("Text.", "less", ["--many", "3", "4", "--words", "b", "--flag", "--two-words", "2"], **added)
    assert vars(found) == {"quick": False, "many": [3, 4], "words": ["b"], "flag": True, "two_words": 2.0, "none": None}
    assert vars(common.options("Text.", command=[], **added)) == {
        "many": [1],
        "words": ("a", "b"),
        "flag": False,
        "two_words": 1.5,
        "none": None,
    }
