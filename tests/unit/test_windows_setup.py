"""`make windows` installs what `.ci/requirements.txt` pins, as it is for Windows."""

import re
from pathlib import PurePosixPath, PureWindowsPath

import pytest
from support.package import ROOT, load_script


@pytest.fixture(scope="module")
def packages():
    return load_script(ROOT / ".ci" / "windows_setup.py").packages()


def test_every_package_has_one_version(packages):
    names = [re.fullmatch(r"([\w.-]+)==[\w.]+", line).group(1) for line in packages]
    assert len(set(names)) == len(names)


def test_what_only_linux_has_is_left_out(packages):
    pinned = (ROOT / ".ci" / "requirements.txt").read_text()
    assert "\ntriton==" in pinned
    assert not [line for line in packages if line.startswith(("triton", "nvidia-"))]
    assert [line for line in packages if line.startswith("colorama")]
    assert [line for line in packages if line.startswith("torch==")]


def test_only_paths_of_files_are_translated():
    translated = load_script(ROOT / ".ci" / "wine.py").translated
    here = PurePosixPath(__file__)
    assert PureWindowsPath(translated(str(here))) == PureWindowsPath("Z:/", *here.parts[1:])
    for text in ("-k", "/no/such/file", "tests/windows", ""):
        assert translated(text) == text
