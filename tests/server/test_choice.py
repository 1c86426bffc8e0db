"""How many ranks a call runs on: chosen by what calls took, kept on disk, told in report and panel, and never a matter of the
result. And how fast one device is, measured on request, which is no matter of the result either.

Times are put into the file that a server keeps, so that what is chosen does not hang on the machine. `tests/unit/test_policy.py`
has the formula.
"""

import json

import pytest
from support.graphs import flux_prompt
from support.latents import assert_close
from support.worlds import on_ranks

from cp_runtime.pool.kept import VERSION


def times_file(server):
    return server.base / "cache" / "comfyui-context-parallel" / "calls.json"


def run(server, world, steps=3, **changes):
    """(report of a CP Sampler, latent)."""
    cp = {"world_size": world, "ranks_per_call": "auto", **changes.pop("cp", {})}
    result = server.run(flux_prompt(node="CPSampler", width=128, height=128, steps=steps, cp=cp, **changes)).check()
    return result.report, server.latent(result)


def believe(server, split):
    """Have new workers find in their file that every kind of call is fast on a split, and slow otherwise."""
    content = json.loads(times_file(server).read_text())
    for kinds in content["machines"].values():
        for entry in kinds.values():
            fast = dict(zip(("ranks", "batch", "ring", "ulysses"), split, strict=True))
            slow = {"seconds": 100.0, "compute": 90.0, "communication": 10.0, "count": 5}
            # Beside unequal ranks, the fastest alone has little more to do, and would be tried.
            alone = {"ranks": [0], "batch": 1, "ring": 1, "ulysses": 1}
            # And which of these two is the default hangs on how the link was measured: the other one would be tried.
            twin = {**fast, "ring": fast["ulysses"], "ulysses": fast["ring"]}
            others = [each for each in (entry["default"], alone, twin) if each != fast]
            entry["runs"] = [[each, slow] for each in others]
            entry["runs"] += [[fast, {"seconds": 1e-6, "compute": 1e-6, "communication": 0.0, "count": 5}]]
    times_file(server).write_text(json.dumps(content))
    server.post("/context_parallel/restart")


@pytest.mark.parametrize(
    ("split", "changes", "world"),
    [
        on_ranks(2, ([0], 1, 1, 1), {}, id="one of two"),
        on_ranks(2, ([0, 1], 1, 2, 1), {"cp": {"shares": "3,1"}}, id="a ring, shares 3:1"),
        on_ranks(2, ([0, 1], 1, 1, 1), {"cp": {"weights": "sharded"}}, id="one of two, whose weights are shared out"),
        on_ranks(2, ([0, 1], 2, 1, 1), {"cfg": 4.0}, id="groups for CFG"),
        on_ranks(3, ([0, 2], 1, 1, 2), {}, id="two of three"),
        on_ranks(3, ([0, 1], 2, 1, 1), {"cfg": 4.0, "cp": {"shares": "2,1,1"}}, id="groups of two of three"),
    ],
)
def test_what_was_fastest_runs_and_the_result_is_the_same(split, changes, world, server):
    _, stock = run(server, 1, **{**changes, "cp": {}})
    run(server, world, steps=1, **changes)
    believe(server, split)
    report, latent = run(server, world, **changes)
    ranks, batch, ring, ulysses = split
    assert report["degrees"] == {"ulysses": ulysses, "ring": ring, "batch": batch}
    choice = report["choice"]
    assert (choice["ranks"], choice["of"]) == (batch * ring * ulysses, world)
    assert [bool(rank["tokens"]) for rank in report["ranks"]] == [rank in ranks for rank in range(world)]
    assert report["shares"] == [int(share) for share in changes.get("cp", {}).get("shares", "").split(",") if share]
    assert_close(latent, stock)
    status = server.status()
    assert [rank["idle"] for rank in status["ranks"]] == [rank not in ranks for rank in range(world)]
    assert status["last_call"]["choice"] == choice["words"]
    if batch * ring * ulysses < world:
        assert choice["words"].startswith(f"{batch * ring * ulysses} of {world} devices; {world} would take")
        assert "(measured)" in choice["words"]
        assert choice["alternative"]["times"] > 2


def test_degrees_that_are_set_are_obeyed_and_all_means_all(server):
    run(server, 2, steps=1)
    believe(server, ([0], 1, 1, 1))
    for cp in ({"ulysses_degree": 2}, {"ring_degree": 2}, {"batch_degree": 1}, {"ranks_per_call": "all"}):
        report, _ = run(server, 2, cp=cp)
        assert report["choice"] is None
        assert all(rank["tokens"] for rank in report["ranks"])


def test_an_unknown_call_runs_on_all_ranks_first_and_a_broken_file_is_replaced(server):
    times_file(server).parent.mkdir(parents=True, exist_ok=True)
    for content in ("", "{", '{"version": 0, "machines": {}}', '{"version": 1, "machines": {"x": 3}}', "[]"):
        times_file(server).write_text(content)
        server.post("/context_parallel/restart")
        report, _ = run(server, 2, steps=2)
        assert report["choice"]["ranks"] == 2
        assert json.loads(times_file(server).read_text())["version"] == VERSION


# --- a call on one device, to compare with ---------------------------------------------------------------------------------


@pytest.mark.bits("the repeated call is thrown away")
@pytest.mark.parametrize(
    "changes",
    [{}, {"cp": {"weights": "sharded"}}, {"cfg": 4.0, "batch": 3}, {"cp": {"ring_degree": 2, "shares": "3,1"}}],
    ids=["whole", "weights shared out", "batch", "a ring, shares 3:1"],
)
def test_a_call_that_is_repeated_on_one_device_changes_no_bit(changes, server):
    changes = {**changes, "cp": {"ranks_per_call": "all", **changes.get("cp", {})}}
    before, expected = run(server, 2, **changes)
    assert server.post("/context_parallel/measure")["status"]["speed"]["measuring"]
    report, latent = run(server, 2, **changes)
    assert (latent == expected).all()
    assert report["calls"] == before["calls"]
    assert report["degrees"] == before["degrees"]
    assert report["seconds_per_call_on_one_device"] > 0
    assert " one process" in report["speed"]
    assert not server.status()["speed"]["measuring"]
    assert run(server, 2, **changes)[0]["seconds_per_call_on_one_device"] == report["seconds_per_call_on_one_device"]


@pytest.mark.bits("the repeated call is thrown away")
def test_a_few_usual_runs_are_measured_by_themselves_once(server):
    """Twenty steps each: `tests/unit/test_journal.py` says in which of them. It changes no bit."""
    runs = [run(server, 2, steps=20, batch=2, tokens=20, cp={"ranks_per_call": "all"}) for _ in range(4)]
    figures = [report["seconds_per_call_on_one_device"] for report, _ in runs]
    measured = [figure for figure in figures if figure is not None]
    assert figures == [None] * (4 - len(measured)) + measured
    assert len(set(measured)) == 1
    assert server.status()["speed"]["parts"]["count"] == 1
    assert all((latent == runs[0][1]).all() for _, latent in runs)
