"""`make test` runs every test once: each file of tests is in exactly one of the jobs of `.ci/lanes.py`."""

import json
import sys

import pytest
from support import durations, shared_models
from support.package import ROOT, load_script


@pytest.fixture(scope="module")
def lanes():
    return load_script(ROOT / ".ci" / "lanes.py")


def files_of(job, jobs):
    """The files that its command line names, as pytest reads it."""
    arguments = job.arguments([other for other in jobs if other is not job])
    left_out = {argument.removeprefix("--ignore=") for argument in arguments if argument.startswith("--ignore=")}
    found = []
    for path in job.paths:
        place = ROOT / path
        found += sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
    names = [str(file.relative_to(ROOT)) for file in found]
    return [name for name in names if name not in left_out]


def test_every_file_of_tests_is_in_one_job(lanes):
    run = [name for job in lanes.JOBS if not job.environment for name in files_of(job, lanes.JOBS)]
    assert sorted(run) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def test_the_quick_jobs_exist(lanes):
    for job in lanes.QUICK:
        assert job.command or all((ROOT / path).exists() for path in job.paths)


def test_a_job_that_fails_is_told_from_one_that_passes(lanes, tmp_path, capsys):
    jobs = [
        lanes.Job(name="good", command=(sys.executable, "-c", "print('fine')")),
        lanes.Job(name="bad", command=(sys.executable, "-c", "print('broken'); raise SystemExit(3)")),
        lanes.Job(name="none", command=(sys.executable, "-c", f"raise SystemExit({lanes.NOTHING_SELECTED})")),
    ]
    outcomes = lanes.run(tuple(jobs), 2, {"CP_TEST_DURATIONS": str(tmp_path / "durations")})
    assert {outcome.job.name: outcome.failed for outcome in outcomes} == {"good": False, "bad": True, "none": False}
    assert "     bad | FAILED after" in capsys.readouterr().out


def test_durations_of_several_runs_are_added_up(tmp_path):
    file = tmp_path / "durations"
    one, other = "tests/unit/test_a.py::test_1", "tests/server/test_b.py::test_2"
    file.write_text(json.dumps({one: 2.0}) + "\n" + json.dumps({one: 1.0, other: 0.5}) + "\n")
    lines = durations.table(durations.read(file))
    assert [line.split() for line in lines if line[0] == " "] == [
        ["3.0", "s", "tests/unit"],
        ["3.0", "s", "test_a.py"],
        ["0.5", "s", "tests/server"],
        ["3.0", "s", one],
    ]


def test_jobs_share_the_models_that_one_of_them_wrote(tmp_path, monkeypatch):
    monkeypatch.setenv(shared_models.VARIABLE, str(tmp_path / "shared"))
    (tmp_path / "shared.part").mkdir()
    (tmp_path / "shared.part" / "half a file").touch()
    written = []

    def write(folder):
        written.append(folder)
        (folder / "loras").mkdir(parents=True)
        (folder / "loras" / "one").write_text("weights")

    for job in ("first", "second"):
        shared_models.provide(tmp_path / job, write)
        assert [file.name for file in (tmp_path / job).rglob("*") if file.is_file()] == ["one"]
        (tmp_path / job / "loras" / "one").write_text("")  # its own
    assert len(written) == 1
