"""`make test` runs every test once: each file of tests is in exactly one of the jobs of `.ci/lanes.py`."""

import pytest
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


@pytest.mark.parametrize(
    ("failed", "had_browser", "in_ci", "line", "status"),
    [
        ([], True, True, "all passed", 0),
        ([], False, False, "all passed, but the tests in a browser did not run (no Chromium: ", 0),
        ([], False, True, "FAILED: the tests in a browser did not run (no Chromium: ", 1),
        (["unit", "lint"], False, False, "FAILED: unit, lint", 1),
    ],
)
def test_the_last_line_says_what_did_not_run(lanes, failed, had_browser, in_ci, line, status):
    said, code = lanes.ending(failed, had_browser, in_ci)
    assert (said.startswith(line), code) == (True, status)


def test_every_file_of_tests_is_in_one_job(lanes):
    run = [name for job in lanes.JOBS for name in files_of(job, lanes.JOBS)]
    assert sorted(run) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
