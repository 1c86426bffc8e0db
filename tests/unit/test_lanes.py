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


def test_every_file_of_tests_is_in_one_job(lanes):
    run = [name for job in lanes.JOBS if not job.environment for name in files_of(job, lanes.JOBS)]
    assert sorted(run) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
