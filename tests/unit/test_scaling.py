"""What the cost model says: the command, and the page that it writes."""

import sys

from support.package import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import scaling
from forecast import main


def test_the_command(capsys):
    main(["--model", "wan14b", "--tokens", "75600", "--devices", "4", "--link", "pcie4", "--seconds", "100"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Wan 14B, 720p, 81 frames, CFG: 75600 tokens, 4 devices, PCIe 4 x16 (4090). Predicted, not measured."
    assert [line.split()[0] for line in lines[2:]] == ["1", "4", "CP"]
    assert lines[2].split()[-2:] == ["100", "1.00x"]
    assert lines[-1].startswith("CP Config would take CFG 2 x")


def test_the_page_is_the_one_that_the_model_writes():
    page = (ROOT / "docs" / "generated" / "scaling.md").read_text()
    for run in scaling.PUBLISHED:
        for each in run.replay:
            assert f" {each}" in page, "run benchmarks/scaling.py"
