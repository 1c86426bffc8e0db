"""What node packs do to ComfyUI's classes and modules is seen; what ComfyUI itself does is not taken for it."""

from pathlib import Path

import pytest
from support.ranks import COMFY, run_steps


@pytest.fixture(scope="module")
def found():
    return run_steps(Path(__file__).with_name("changed_code_ranks.py"), 1, by="name", preload=COMFY)


def test_stock_code_is_as_in_its_files(found):
    """tests/ranks/families has this for all classes."""
    assert found["stock"] == {"changes": [], "again": True}


def test_what_ranks_would_not_do_otherwise_is_no_change(found):
    assert found["harmless"]["changes"] == []
    assert found["compiled"]["changes"] == []


def test_packages_may_be_anywhere(found):
    """One H100's had a folder of their own: every prompt was refused there."""
    assert found["packages elsewhere"] == {"changes": [], "libraries": [True, True, False, False]}


def test_vaes(found):
    assert found["a VAE"]["clean"] == []
    assert [what for what, _ in found["a VAE"]["changes"]] == ["comfy.ldm.wan.vae.WanVAE.decode"]


def test_changes_are_seen_by_name_and_file(found):
    cases = {case: report for case, report in found.items() if "what" in report}
    assert len(cases) == 24
    for case, report in cases.items():
        changes = dict(report["changes"])
        assert report["what"] in changes, report
        assert report["foreign"] in (None, changes[report["what"]]), case
        assert report["quick"], case
        assert report["after"] == [], case
    older = cases["a method of an older file"]
    assert dict(older["changes"])[older["what"]].endswith("comfy/ldm/wan/model.py")
