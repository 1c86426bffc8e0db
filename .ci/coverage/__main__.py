"""Write docs/generated/coverage.md: which of ComfyUI's own workflow templates run, and what keeps the others.

    python .ci/coverage [--report FILE]

What runs is what a server test has shown. With CP_COVERAGE_REPORT set, the tests append to that file, for every prompt of a test
that passed, its node classes, families and weights (tests/support/exercised.py). Without --report they run now.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rules
from templates import FOLLOWED, MODEL_TYPES, Template, installed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "generated" / "coverage.md"
DISTRIBUTION = "comfyui-workflow-templates"

# `python -m pytest` would put the checkout on sys.path, where the folder nodes/ hides ComfyUI's nodes.py.
PYTEST = "import sys; sys.path[:] = filter(None, sys.path); import pytest; sys.exit(pytest.main())"


@dataclass(frozen=True)
class Report:
    """What the tests have shown to run, and what to be refused."""

    families: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    @classmethod
    def load(cls, file: Path) -> Report:
        report = cls()
        for line in file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["outcome"] == "refused":
                report.refused.update(entry["classes"], map(rules.slug, entry["families"]))
            else:
                report.classes.update(entry["classes"])
                report.families.update(map(rules.slug, entry["families"]))
                report.weights.update(entry["weights"])
        return report

    def has(self, kind: str, name: str) -> bool:
        match kind:
            case "family":
                return rules.slug(name) in self.families
            case "weights":
                return name not in rules.QUANTISED or name in self.weights
            case _:
                return name in self.classes

    def refuses(self, name: str) -> bool:
        return bool(self.refused & {name, rules.slug(name)})


@dataclass(frozen=True)
class Needs:
    """What a template needs to run: everything between its files and the forwards of its samplers."""

    template: str
    files: list[tuple[str, str]]
    classes: list[str]

    @classmethod
    def of(cls, template: Template) -> Needs:
        loaders = {up: None for sampler in template.samplers for up in sampler.upstream(MODEL_TYPES) if up.loads_model}
        files = {(str(node.widgets[0]), str(node.widgets[1]) if len(node.widgets) > 1 else "default") for node in loaders}
        nodes = {up.type for sampler in template.samplers for up in sampler.upstream(FOLLOWED)}
        return cls(template.name, sorted(files), sorted(filter(rules.matters, nodes)))

    @property
    def families(self) -> list[str]:
        return sorted({rules.family(file) for file, _ in self.files})

    @property
    def weights(self) -> list[str]:
        return sorted({rules.weights(*file) for file in self.files})

    def all(self) -> Iterator[tuple[str, str]]:
        """Kind and name of every need."""
        yield from (("family", name) for name in self.families)
        yield from (("weights", name) for name in self.weights)
        yield from (("node", name) for name in self.classes)

    def missing(self, report: Report) -> list[tuple[str, str]]:
        return [need for need in self.all() if not report.has(*need)]

    def verdict(self, report: Report) -> str:
        missing = self.missing(report)
        refusals = [rules.REFUSED[name] for _, name in missing if name in rules.REFUSED]
        if refusals:
            return f"refused: {'; '.join(dict.fromkeys(refusals))}"
        return f"not exercised: {', '.join(name for _, name in missing)}" if missing else "runs"


def page(needs: list[Needs], report: Report) -> str:
    """The text of docs/generated/coverage.md."""
    running = [need for need in needs if not need.missing(report)]
    blocking = Counter(item for need in needs for item in need.missing(report))
    alone = Counter(missing[0] for need in needs if len(missing := need.missing(report)) == 1)
    demand = Counter(item for need in needs for item in need.all())
    families = Counter(name for need in needs for name in need.families)
    by_family = Counter(name for need in running for name in need.families)
    files = Counter(file for need in needs for file in need.files)

    def shown(kind: str, name: str) -> str:
        return "yes" if report.has(kind, name) else ("refused" if name in rules.REFUSED else "no")

    return "\n".join(
        [
            "# Coverage of ComfyUI's templates",
            "",
            f"""\
Generated by `make coverage`; not to be edited. Of the workflow templates that come with ComfyUI ({DISTRIBUTION}
{version(DISTRIBUTION)}), these sample with a local model. One *runs* when server tests have shown, under context parallelism,
its family, its kind of quantised weights, its loader, sampler and guider, and every node class between them that changes more
than numbers in what the forward gets. Bypassed nodes count.
""",
            f"**{len(running)} of {len(needs)} templates run.**",
            "",
            "## Families",
            "",
            *table(
                ("Family", "Templates", "Run", "Exercised"),
                ((name, count, by_family[name], shown("family", name)) for name, count in ranked(families)),
            ),
            "",
            "## What is missing",
            "",
            "*Alone*: templates that lack nothing else.",
            "",
            *table(("Kind", "Name", "Templates", "Alone"), ((*item, count, alone[item]) for item, count in ranked(blocking))),
            "",
            "## Node classes",
            "",
            *table(
                ("Class", "Templates", "Exercised"),
                ((name, count, shown(kind, name)) for (kind, name), count in ranked(demand) if kind == "node"),
            ),
            "",
            "## Weights",
            "",
            *table(
                ("Kind", "Templates", "Exercised"),
                ((name, count, shown(kind, name)) for (kind, name), count in ranked(demand) if kind == "weights"),
            ),
            "",
            "## Templates",
            "",
            *table(
                ("Template", "Family", "Weights", "Nodes", "Verdict"),
                (
                    (need.template, *map(", ".join, (need.families, need.weights, need.classes)), need.verdict(report))
                    for need in sorted(needs, key=lambda need: (need.families, need.template))
                ),
            ),
            "",
            "## Model files",
            "",
            *table(
                ("File", "Family", "Weights", "Loader's weight_dtype", "Templates"),
                (
                    (file, rules.family(file), rules.weights(file, dtype), dtype, count)
                    for (file, dtype), count in sorted(files.items(), key=lambda item: (rules.family(item[0][0]), item[0]))
                ),
            ),
            "",
        ]
    )


def ranked(counter: Counter[Any]) -> list[tuple[Any, int]]:
    """By count, then by name."""
    return sorted(counter.items(), key=lambda item: (-item[1], item[0]))


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)


def run_tests(report: Path) -> int:
    """Run the server tests with a report and return pytest's exit status."""
    command = [sys.executable, "-c", PYTEST, "-q", "tests/server"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "CP_COVERAGE_REPORT": str(report)}, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/generated/coverage.md.")
    parser.add_argument("--report", type=Path, help="what an earlier run of the tests has written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = options.report or Path(folder) / "report.jsonl"
        file.touch()
        status = 0 if options.report else run_tests(file)
        report = Report.load(file)
    unproved = [name for name in rules.REFUSED if not report.refuses(name)]
    if unproved:
        sys.stderr.write(f"no test showed that these are refused: {', '.join(unproved)}\n")
        return 1
    needs = [Needs.of(template) for template in installed() if template.samplers]
    PAGE.write_text(page(needs, report), encoding="utf-8")
    sys.stdout.write(f"{sum(not need.missing(report) for need in needs)} of {len(needs)} templates run\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
