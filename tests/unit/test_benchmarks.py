"""Benchmarks: what they import is there, `make bench` says which ratios moved, and `make demo` who else used the cores."""

import ast
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.package import ROOT, load_script
from support.processes import OtherPrograms

BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))
import common  # noqa: E402
import recorded  # noqa: E402

ROOTS = {"support": ROOT / "tests", "cp_runtime": ROOT, "gpu_sections": BENCHMARKS}
SPIN = "import time\nwhile time.process_time() < 0.5: pass\n"  # seconds of a core, however busy the others are


def imports(program: Path):
    """(module, its file or folder, name) of what a program takes from this repository, inside of functions too."""
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            base = program.parent if node.level else ROOTS.get(node.module.partition(".")[0])
            if base is not None:
                for alias in node.names:
                    yield node.module, base.joinpath(*node.module.split(".")), alias.name


def names(module: Path) -> set[str]:
    """What the first level of a module binds, whether a condition holds or not."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


@pytest.mark.parametrize("program", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_what_it_imports_is_there(program):
    """Most of them take minutes or a GPU, and no test runs them."""
    missing = []
    for module, place, name in imports(program):
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not ((place / f"{name}.py").exists() or (place / name).is_dir() or (file.exists() and name in names(file))):
            missing.append(f"{module}.{name}")
    assert missing == []


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


def test_what_a_process_and_its_descendants_use_is_not_that_of_others():
    """One computes in a child that ends, and in itself; the other sleeps."""
    child = [sys.executable, "-c", SPIN]
    computes = f"input()\nimport subprocess; subprocess.run({child!r})\n{SPIN}print('done', flush=True); time.sleep(60)"
    programs = [[sys.executable, "-c", code] for code in (computes, "import time; time.sleep(60)")]
    busy, idle = started = [subprocess.Popen(p, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for p in programs]
    try:
        began, of_busy, of_idle = time.monotonic(), OtherPrograms(busy.pid), OtherPrograms(idle.pid)
        busy.stdin.write("\n")
        busy.stdin.flush()
        assert busy.stdout.readline() == "done\n"
        for_busy, for_idle = of_busy.cores(), of_idle.cores()
        seconds = time.monotonic() - began
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert (for_idle - for_busy) * seconds > 0.9


def test_the_demo_says_where_others_used_the_cores():
    demo = load_script(ROOT / "benchmarks" / "demo.py")
    assert demo.disturbance({1: 0.9, 2: 0.05}, 2) == demo.disturbance({1: 0.0, 4: 0.05}, 2) == ""
    said = demo.disturbance({1: 0.9, 2: 0.8}, 2)
    assert said.startswith(
        "Other programs used 0.90 beside 1 rank and 0.80 beside 2 ranks of 2 cores: this is not the ratio of an idle"
    )
    assert demo.disturbance({1: 1.2, 2: 0.0}, 2)
