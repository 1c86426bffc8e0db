"""Figures and names that the documents give are those of the code, of the tests, and of the pages that are generated."""

import ast
import json
import re

import pytest
from support.package import ROOT

from cp_runtime.comfyui import TESTED
from cp_runtime.families import PLANS
from cp_runtime.pool.settings import SETTINGS
from cp_runtime.version import VERSION


def read(document: str) -> str:
    return (ROOT / document).read_text()


def claimed(document: str, pattern: str) -> tuple[str, ...]:
    """What a document says, once: the groups of the pattern."""
    (found,) = re.findall(pattern, " ".join(read(document).split()))
    return (found,) if isinstance(found, str) else found


def test_model_classes_are_counted():
    named, more = claimed("README.md", r"ComfyUI samples with: ([^.]*?) and (\d+) more families")
    assert len(named.split(", ")) + int(more) == len(PLANS)
    assert claimed("CHANGELOG.md", r"(\d+) model classes") == (str(len(PLANS)),)
    classes, calls = claimed("docs/comparison.md", r"\*\*(\d+) classes\*\*.*?, (\d+) calls compared")
    assert int(classes) == len(PLANS)
    assert calls == claimed("docs/generated/families.md", r"calls of the forward, (\d+) in all")[0]


def test_templates_are_those_that_the_coverage_counts():
    assert claimed("README.md", r"\*\*(\d+ of \d+)\*\*") == claimed("docs/generated/coverage.md", r"\*\*(\d+ of \d+) templates run")


FIGURES = {
    r"`make demo`\) \| ([\d.]+)": r"`make demo` \| [\d.]+ s / [\d.]+ s, ratio ([\d.]+)",
    r"Flux-like / UNet-like \| ([\d.]+) / ([\d.]+)": r"Flux-like / UNet-like \| `make bench` \| ([\d.]+) × / ([\d.]+) ×",
    r"Flux 1024 × 1024 / Wan 2.1.*? \| ([\d.]+) / ([\d.]+)": "1024 × 1024 TIMES .*? 9 frames of 832 × 480 TIMES".replace(
        "TIMES", r"\| exact \| [\d.]+ \| [\d.]+ \| ([\d.]+)"
    ),
    r"at most ([\d.e-]+); their standard deviation is 4.1": r"standard deviation 4.1\) \| `make demo` \| ([\d.e-]+)",
}
"""Of the README, and where docs/performance.md has the same."""


@pytest.mark.parametrize("pattern", FIGURES)
def test_figures_of_the_readme_are_those_of_the_performance_page(pattern):
    page = " ".join(read("docs/performance.md").split())
    measured = re.search(FIGURES[pattern], page)
    assert measured is not None
    assert re.search(pattern, " ".join(read("README.md").split())).groups() == measured.groups()


def test_the_attention_table_is_that_of_the_record():
    """Ratios over all lengths: least to most of the times, and the memory, each also with `*_anything`."""
    ratios = json.loads(read("benchmarks/recorded.json"))["ratios"]
    rows = re.findall(r"^\| (\d), (ring|ulysses|unified)(, \w+)? \|(.*)", read("docs/performance.md"), re.MULTILINE)
    assert len(rows) == 8
    for ranks, mode, method, cells in rows:
        expected = []
        for kind in ("diffusers / ours", "memory ours / diffusers"):
            for anything in ("", " anything"):
                name = rf"attention, {ranks} ranks, {mode}{anything}{method}, \d+ tokens, {kind}"
                found = [ratio for key, ratio in ratios.items() if re.fullmatch(name, key)]
                ends = dict.fromkeys(f"{each(found):.2f}" for each in (min, max)) if found else ()
                expected.append(" to ".join(ends))
        assert [cell.strip() for cell in cells.split("|")][:4] == expected


@pytest.mark.parametrize("file", ["README.md", "docs/install.md", "pyproject.toml", "docs/generated/families.md"])
def test_the_versions_of_comfyui_that_were_tested_are_named(file):
    (named,) = set(re.findall(r"(?:tested with|checked against)(?: ComfyUI)? ([\d. and]+\d)", " ".join(read(file).split())))
    assert tuple(named.split(" and ")) == TESTED


def test_every_case_of_the_reliability_page_is_measured_by_a_test():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    numbers = set(re.findall(r"^\| (\d+) |[Cc]ases? (\d+)", read("docs/generated/reliability.md"), re.MULTILINE))
    named = {row or prose for row, prose in numbers}
    assert len(named) > 30
    assert [number for number in sorted(named) if not re.search(rf"""["']{number} |Case {number}\b""", tests)] == []


DOCUMENTS = [path for path in ROOT.rglob("*.md") if not path.relative_to(ROOT).parts[0].startswith(".")]
WRITTEN = "\n".join(path.read_text() for path in DOCUMENTS)
CODE = "\n".join(path.read_text() for path in ROOT.rglob("*") if path.suffix in (".py", ".js") or path.name == "Makefile")


def test_commands_that_the_documents_name_exist():
    targets = set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^ +)make ([a-z-]+)", WRITTEN, re.MULTILINE))
    assert len(named) > 10
    assert sorted(named - targets) == []


def test_environment_variables_that_the_documents_name_are_read():
    named = set(re.findall(r"\b(CP_[A-Z_]+)\b", WRITTEN))
    assert {"CP_LOAD_TIMEOUT", "CP_PYTHON"} <= named
    assert [name for name in sorted(named) if name not in CODE] == []


def test_routes_that_the_documents_name_are_served():
    named = set(re.findall(r"(?<![\w/])(?:http://127.0.0.1:8188)?(/context_parallel/\w+)", WRITTEN))
    assert len(named) == 6
    assert [route for route in sorted(named) if f'"{route}"' not in read("cp_runtime/comfy/ui/server.py")] == []


def test_every_key_of_the_status_is_documented():
    module = ast.parse(read("cp_runtime/comfy/ui/status.py"))
    (status,) = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "status"]
    written = [node for node in ast.walk(status) if isinstance(node, ast.Dict)]
    keys = {key.value for node in written for key in node.keys if isinstance(key, ast.Constant)}
    assert {"state", "ranks"} <= keys
    page = read("docs/failures.md").partition("## The status")[2]
    assert sorted(key for key in keys if f"`{key}`" not in page) == []


def test_settings_that_the_documents_name_are_inputs_of_cp_config():
    named = {
        name
        for names in re.findall(r"((?:`\w+`(?:, | or | and )?)+)(?: of| in) CP Config\b", WRITTEN)
        for name in re.findall(r"\w+", names)
    }
    assert {"shares", "ranks_per_call"} <= named
    assert sorted(named - SETTINGS.keys() - {"or", "and"}) == []


def test_durations_of_the_readme_are_those_that_were_measured():
    page = read("docs/performance.md")
    for command, measured in (
        ("demo", r"empty cache / ready cache \| \| [\d a-z]+ / (\d+) min (\d+) s"),
        ("test", r"tests, (\d+) min (\d+) s"),
    ):
        minutes, seconds = re.search(measured, page).groups()
        assert claimed("README.md", rf"make {command} +# (\d+) minutes") == (str(round(int(minutes) + int(seconds) / 60)),)


def test_the_version_is_that_of_the_project_file():
    assert re.search(r'^version = "(.+)"$', read("pyproject.toml"), re.MULTILINE)[1] == VERSION
