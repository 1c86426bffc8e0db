"""What `make test` leaves out runs in `make soak`."""

import re

from support.package import ROOT, load_script

soak = load_script(ROOT / ".ci" / "soak.py")


def test_what_make_test_leaves_out_runs_there():
    named = (*soak.TESTS, *soak.AT_FULL_LENGTH)
    leaves_out = re.compile(r"\bSOAK\b|mark\.soak|soak=|by_turns|in_modes")
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if leaves_out.search(file.read_text())]
    paths = [str(file.relative_to(ROOT)) for file in files if file.name != "test_pages.py"]
    assert len(paths) > 20
    assert [path for path in paths if not path.startswith(named)] == []
    assert [path for path in named if not (ROOT / path).exists()] == []
