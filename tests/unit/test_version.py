"""The version that the pack states is the one it is published under."""

import re

from support.package import ROOT

from cp_runtime.version import VERSION


def test_the_version_is_that_of_the_project_file():
    assert re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1] == VERSION
