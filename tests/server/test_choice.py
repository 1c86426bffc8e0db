"""How many ranks a call runs on: chosen by what calls took, kept on disk, told in report and panel, and never a matter of the
result. And how fast one device is, measured on request, which is no matter of the result either.

Times are put into the file that a server keeps, so that what is chosen does not hang on the machine. `tests/unit/test_choice.py`
has the rule.
"""

import itertools
import json

import pytest
from support.graphs import flux_prompt
from support.latents import assert_close
from support.server import ComfyServer

WORLD = 2
CASES = {
    "shared weights": {"cp": {"weights": "sharded"}},
    "CFG, shares 2:1": {"cfg": 4.0, "cp": {"shares": "2,1"}},
}


def times_file(server):
    return server.base / "cache" / "comfyui-context-parallel" / "times.json"


def run(server, world, steps=3, **changes):
    """(report of a CP Sampler, latent)."""
    cp = {"world_size": world, "ranks_per_call": "auto", **changes.pop("cp", {})}
    result = server.run(flux_prompt(node="CPSampler", width=128, height=128, steps=steps, cp=cp, **changes)).check()
    return result.report, server.latent(result)


@pytest.fixture(scope="module")
def times_server(comfyui_path, checkpoints_dir):
    """A server of this file's own: what it knows of calls, it reads when it starts."""
    with ComfyServer(comfyui_path, models=checkpoints_dir) as running:
        yield running


@pytest.fixture(scope="module")
def stock(times_server):
    return {name: run(times_server, 1, **{**changes, "cp": {}})[1] for name, changes in CASES.items()}


@pytest.fixture(scope="module")
def one_is_fastest(times_server, stock):
    """The server, which finds in its file that one rank takes a hundred millionth of the time of two."""
    server = times_server
    for changes in CASES.values():
        server.post("/context_parallel/measure")
        run(server, WORLD, **{**changes, "cp": {"ranks_per_call": "all", **changes.get("cp", {})}})
    server.stop()
    content = json.loads(times_file(server).read_text())
    kinds: dict[str, list[str]] = {}
    for name in content["entries"]:
        kinds.setdefault(name.partition(" ")[0], []).append(name)
    for names in kinds.values():
        # The stock run; then of every case one rank, in the second call, and all, also in the last one.
        for name, seconds in zip(names[1:], itertools.cycle((1e-6, 100.0)), strict=False):
            content["entries"][name] = [seconds, seconds]
    times_file(server).write_text(json.dumps(content))
    server.start()
    return server


@pytest.mark.parametrize("case", CASES)
def test_what_was_fastest_runs_and_the_result_is_the_same(case, one_is_fastest, stock):
    server = one_is_fastest
    report, latent = run(server, WORLD, **CASES[case])
    assert report["degrees"] == {"ulysses": 1, "ring": 1, "batch": 1}
    choice, shared = report["choice"], case == "shared weights"
    assert (choice["ranks"], choice["of"]) == (1, WORLD)
    assert [bool(rank["tokens"]) for rank in report["ranks"]] == [True, shared]  # then both compute the same
    assert_close(latent, stock[case])
    status = server.status()
    assert [rank["idle"] for rank in status["ranks"]] == [False, not shared]
    assert status["last_call"]["choice"] == choice["words"]
    assert choice["words"].startswith("1 of 2 devices; 2 would take")
    assert "(measured)" in choice["words"]
    assert choice["alternative"]["times"] > 2


def test_degrees_that_are_set_are_obeyed_and_all_means_all(one_is_fastest):
    for cp in ({"ulysses_degree": 2}, {"ring_degree": 2}, {"batch_degree": 1}, {"ranks_per_call": "all"}):
        report, _ = run(one_is_fastest, WORLD, cp=cp)
        assert report["choice"] is None
        assert all(rank["tokens"] for rank in report["ranks"])


# --- a call on one device, to compare with ---------------------------------------------------------------------------------


@pytest.mark.bits("the repeated call is thrown away")
@pytest.mark.parametrize(
    "changes",
    [{"cp": {"weights": "sharded"}}, {"cfg": 4.0, "batch": 3, "cp": {"ring_degree": 2, "shares": "3,1"}}],
    ids=["weights shared out", "a batch on a ring, shares 3:1"],
)
def test_a_call_that_is_repeated_on_one_device_changes_no_bit(changes, server):
    changes = {**changes, "cp": {"ranks_per_call": "all", **changes.get("cp", {})}}
    before, expected = run(server, 2, **changes)
    assert server.post("/context_parallel/measure")["status"]["speed"]["measuring"]
    report, latent = run(server, 2, **changes)
    assert (latent == expected).all()
    assert report["calls"] == before["calls"]
    assert report["degrees"] == before["degrees"]
    assert " one process" in report["speed"]
    assert not server.status()["speed"]["measuring"]
    again, _ = run(server, 2, **changes)
    figures = [each["seconds_per_call_on_one_device"] for each in (report, again)]
    disturbed = ["the comparison was disturbed" in each["speed"] for each in (report, again)]  # where others use the cores
    assert [figure is None for figure in figures] == disturbed
    assert len({figure for figure in figures if figure is not None}) <= 1


@pytest.mark.bits("the repeated call is thrown away")
def test_a_few_usual_runs_are_measured_by_themselves_once(server):
    """Twenty steps each: `tests/unit/test_journal.py` says in which of them. It changes no bit."""
    runs = [run(server, 2, steps=20, batch=2, tokens=20, cp={"ranks_per_call": "all"}) for _ in range(4)]
    figures = [report["seconds_per_call_on_one_device"] for report, _ in runs]
    disturbed = ["the comparison was disturbed" in report["speed"] for report, _ in runs]  # where others use the cores
    known = [figure is not None or off for figure, off in zip(figures, disturbed, strict=True)]
    assert known == sorted(known)
    assert known[-1]
    assert len({figure for figure in figures if figure is not None}) <= 1
    assert all((latent == runs[0][1]).all() for _, latent in runs)
