"""A sharded call leaves nothing behind, and can be traced."""

import json
from collections import Counter

from support.ranks import run_ranks

SCRIPT = "attention/call_ranks.py"


def test_nothing_of_a_call_outlives_it():
    """Without the garbage collector, which may take its time: device memory of a call must be free for the next one."""
    whole, failed = run_ranks(SCRIPT, 2, "left")
    assert (whole["made"], failed["made"]) == (8, 4)
    assert whole["alive"] == failed["alive"] == 0


def test_every_rank_writes_a_trace_of_three_calls(tmp_path, monkeypatch):
    monkeypatch.setenv("CP_PROFILE", str(tmp_path / "new" / "folder"))
    run_ranks(SCRIPT, 2, "traced")
    files = sorted((tmp_path / "new" / "folder").iterdir())
    assert [file.name for file in files] == ["rank0.json", "rank1.json"]
    for file in files:
        events = json.loads(file.read_text())["traceEvents"]
        ranges = Counter(event["name"] for event in events if event["name"].startswith("cp."))
        assert ranges == {
            "cp.call": 3,
            "cp.block blocks.0": 3,
            "cp.block blocks.1": 3,
            "cp.attention": 6,
            "cp.all_to_all": 12,  # to the heads and back
            "cp.wait all_to_all": 12,
            "cp.all_gather": 3,  # the output
            "cp.wait all_gather": 3,
        }
        first = {name: next(event for event in events if event["name"] == name) for name in ("cp.call", "cp.attention")}
        assert first["cp.call"]["ts"] < first["cp.attention"]["ts"]
