"""`make gpu-check`: its runner with sections of a few lines, and in `make soak` a rehearsal of the real ones."""

import json
import os
import sys
import time

import psutil
import pytest
from support import preloaded
from support.package import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))
from gpu_check import RESULTS, TABLE, run  # noqa: E402
from gpu_sections import GROUPS, SECTIONS  # noqa: E402
from gpu_sections.section import NEEDS_CARD, WHOLE, anonymous, read  # noqa: E402

SLEEPER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
REPORTS = """
import sys
from pathlib import Path
sys.path += {paths}
from gpu_sections.section import Section
me = Path(__file__)
Section(name=me.stem, path=me.with_name("results.jsonl")).add("a check", "{{}}")
""".format(paths=[str(BENCHMARKS), str(ROOT / "tests")])
CODES = {
    "raises": "raise RuntimeError('it went wrong')",
    "hangs": f"{SLEEPER}; import time; time.sleep(600)",
    "dies": "import os; os.abort()",
    "is fine": REPORTS.format("ok"),
    "says that it failed": REPORTS.format("failed"),
    "cannot": REPORTS.format("needs several GPUs"),
    "says nothing": "print('fine')",
}


def sections(folder, seconds=5.0, **codes):
    for name, code in codes.items():
        (folder / f"{name}.py").write_text(code)
    return {name: (seconds, [str(folder / f"{name}.py")]) for name in codes}


def test_a_section_that_fails_or_hangs_does_not_stop_the_next(tmp_path):
    began = time.monotonic()
    assert not run(sections(tmp_path, 6.0, **CODES), tmp_path)
    assert time.monotonic() - began < 40
    lines = {line["section"]: line for line in read(tmp_path / RESULTS) if line["check"] == WHOLE}
    assert {name: line["result"] for name, line in lines.items()} == {
        "raises": "failed", "hangs": "timed out", "dies": "failed", "is fine": "ok", "says that it failed": "failed",
        "cannot": "needs several GPUs", "says nothing": "failed",
    }  # fmt: skip
    assert "it went wrong" in lines["raises"]["reason"]
    assert "ended after 6 s" in lines["hangs"]["reason"]
    assert "SIGABRT" in lines["dies"]["reason"]
    assert lines["says that it failed"]["reason"] == "1 of 1 checks failed"
    left = [process for process in psutil.process_iter(["cmdline"]) if "time.sleep(600)" in " ".join(process.info["cmdline"] or ())]
    assert left == []
    table = (tmp_path / TABLE).read_text()
    assert "| raises | failed |" in table
    assert "| is fine | ok |" in table


def test_texts_tell_neither_paths_nor_names(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "marvin")
    text = anonymous({"reason": ["/home/marvin/ComfyUI/main.py: no ~/models for marvin", "and/or 3/4 cuda:0, left after /free"]})
    assert text == {"reason": ["<path>: no <path> for <name>", "and/or 3/4 cuda:0, left after /free"]}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory, comfyui_path):
    out, bare = tmp_path_factory.mktemp("rehearsal"), tmp_path_factory.mktemp("bare")
    (bare / "pytest.py").write_text("raise ImportError('a machine with a GPU need not have it')")
    command = [str(BENCHMARKS / "gpu_check.py"), "--rehearse", "--few", "--sections", *SECTIONS, "--out", str(out)]
    environment = {**os.environ, "COMFYUI_PATH": str(comfyui_path), "PYTHONPATH": str(bare)}
    return out, preloaded.run(command, env=environment, timeout=500)


@pytest.mark.soak
def test_every_section_that_is_rehearsed_reports(rehearsal):
    out, done = rehearsal
    assert done.returncode == 0, done.stdout
    lines = read(out / RESULTS)
    whole = {line["section"]: line["result"] for line in lines if line["check"] == WHOLE}
    assert whole == dict.fromkeys(SECTIONS, "ok")
    for name in SECTIONS:
        assert [line for line in lines if line["section"] == name and line["check"] != WHOLE]
    assert {line["section"] for line in lines if line["result"] == NEEDS_CARD} == {"nccl"}
    assert (out / TABLE).read_text().startswith("# GPU check")


@pytest.mark.soak
def test_the_report_of_a_rehearsal_holds_no_paths(rehearsal, tmp_path):
    text = json.dumps(read(rehearsal[0] / RESULTS))
    for path in (ROOT, rehearsal[0], os.environ["COMFYUI_PATH"], os.path.expanduser("~/")):
        assert str(path) not in text


def test_every_group_ends_within_nine_minutes():
    assert all(sum(sections.values()) <= 540 - 10 for sections in GROUPS.values())
