"""`make soak`: the writer of the reliability page, whose measurements take hours, and what is run."""

import argparse
import json
import re

from support.package import ROOT, load_script

soak = load_script(ROOT / ".ci" / "soak.py")


def measured(case: str, *seconds: float, what: str = "the prompt fails", bound: float = 1.0) -> list[str]:
    return [json.dumps({"case": case, "what": what, "unit": "s", "bound": bound, "measured": each}) for each in seconds]


def test_cases_of_one_promise_are_one_row(tmp_path, monkeypatch):
    report = tmp_path / "report.jsonl"
    lines = [
        *measured("10 a loop in Python", 0.2, 0.3),
        *measured("2 SIGKILL of rank 0 of 3 in a call", 0.1, 0.18),
        *measured("2 SIGKILL of rank 1 of 3 in a call", 1.5),
        *measured("health: restart", 2.0, 3.0, what="looks (at least)", bound=2.5),
    ]
    report.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setattr(soak, "TARGET", tmp_path / "page.md")
    soak.write(report, argparse.Namespace(runs=2, short=True))
    page = (tmp_path / "page.md").read_text()
    assert page.partition("|---|---|---|---|\n")[2].splitlines() == [
        "| 2 SIGKILL of rank … of 3 in a call | the prompt fails | 1 s | 0: 0.18; 1: **1.50** (×1) |",
        "| 10 a loop in Python | the prompt fails | 1 s | 0.30 |",
        "| health: restart | looks (at least) | 2.50 s | **2** |",
    ]


def test_what_make_test_leaves_out_runs_there():
    named = (*soak.TESTS, *soak.AT_FULL_LENGTH)
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if re.search(r"\bSOAK\b|mark\.soak|soak=", file.read_text())]
    paths = [str(file.relative_to(ROOT)) for file in files if file.name != "test_pages.py"]
    assert len(paths) > 20
    assert [path for path in paths if not path.startswith(named)] == []
    assert [path for path in named if not (ROOT / path).exists()] == []
