"""The page that the cost model writes."""

import sys

from support.package import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import scaling


def test_the_page_is_the_one_that_the_model_writes():
    page = (ROOT / "docs" / "generated" / "scaling.md").read_text()
    for run in scaling.PUBLISHED:
        for each in run.replay:
            assert f" {each}" in page, "run benchmarks/scaling.py"
