"""Figures and names that the documents give are those of the code, of the tests, and of the pages that are generated."""

from __future__ import annotations

import re

import pytest
from support.package import ROOT

from cp_runtime.families import PLANS


def read(document: str) -> str:
    return (ROOT / document).read_text()


def claimed(document: str, pattern: str) -> tuple[str, ...]:
    """What a document says, once: the groups of the pattern."""
    (found,) = re.findall(pattern, " ".join(read(document).split()))
    return (found,) if isinstance(found, str) else found


def test_model_classes_are_counted():
    named, more = claimed("README.md", r"ComfyUI samples with: ([^.]*?) and (\d+) families more")
    assert len(named.split(", ")) + int(more) == len(PLANS)
    assert claimed("CHANGELOG.md", r"(\d+) model classes") == (str(len(PLANS)),)
    classes, calls = claimed("docs/comparison.md", r"\*\*(\d+) classes\*\*.*?, (\d+) calls compared")
    assert int(classes) == len(PLANS)
    assert calls == claimed("docs/families.md", r"calls of the forward, (\d+) in all")[0]


def test_templates_are_those_that_the_coverage_counts():
    assert claimed("README.md", r"\*\*(\d+ of \d+)\*\*") == claimed("docs/coverage.md", r"\*\*(\d+ of \d+) templates run")


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
