"""The cost model against what others published, and what it says about machines that nobody has."""

import sys
from statistics import median

import pytest
from support.package import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import scaling
from forecast import LINKS, MODELS, best, forecast, main, operations, work_of


@pytest.mark.parametrize("run", scaling.PUBLISHED, ids=lambda run: run.name)
def test_published_times_follow_from_one_row(run):
    """Or the run says what the model lacks, and needs to."""
    _, worst = run.errors()
    if run.lacks:
        assert worst > scaling.BOUND, "the model does not lack it any more"
    else:
        assert worst <= scaling.BOUND


def test_most_of_the_world_is_covered():
    errors = [abs(each.error) for run in scaling.PUBLISHED for each in run.replay]
    assert len(errors) >= 35
    assert median(errors) <= 0.09
    assert sum(run.errors()[0] > scaling.BOUND for run in scaling.PUBLISHED) <= 4


def test_no_split_is_faster_than_its_devices_allow():
    for link in LINKS.values():
        for model in MODELS.values():
            work = work_of(model)
            for each in forecast(work, 8, link, operations(work) / link.flops):
                assert each.speedup <= each.way.ranks * 1.001


def test_a_better_link_is_no_slower():
    work = work_of(MODELS["flux"])
    found = [best(work, 8, LINKS[name], 1.0).speedup for name in ("pcie3x8", "pcie4x8", "pcie4", "pcie5", "nvlink")]
    assert found == sorted(found)
    assert best(work, 16, LINKS["25gbit"], 0.3).way.ranks <= 8  # a machine has them


def test_the_command(capsys):
    main(["--model", "wan14b", "--tokens", "75600", "--devices", "4", "--link", "pcie4", "--seconds", "100"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Wan 14B, 720p, 81 frames, CFG: 75600 tokens, 4 devices, PCIe 4 x16 (4090). Predicted, not measured."
    assert [line.split()[0] for line in lines[2:]] == ["1", "4", "CP"]
    assert lines[2].split()[-2:] == ["100", "1.00x"]
    assert lines[-1].startswith("CP Config would take CFG 2 x")


@pytest.mark.parametrize("arguments", [["--devices", "0"], ["--tokens", "-3"], ["--seconds", "0"], ["--link", "string"]])
def test_the_command_says_what_is_wrong(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_the_page_is_the_one_that_the_model_writes():
    page = (ROOT / "docs" / "generated" / "scaling.md").read_text()
    for run in scaling.PUBLISHED:
        for each in run.replay:
            assert f" {each}" in page, "run benchmarks/scaling.py"
