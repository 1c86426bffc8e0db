"""What the status and reports are made of: sums instead of lists, and messages that anyone may read."""

import pytest
from support.reports import call_report

from cp_runtime.controller.journal import Journal, public_message
from cp_runtime.controller.run_stats import CallRecord, RunStats, Speed, time_by_rank
from cp_runtime.errors import MirrorError, PoolTimeout, RankError
from cp_runtime.pool.kept import KeptFile, KeptSeconds


def record(*ranks):
    """A call in which each rank took (seconds, of these in communication)."""
    reports = [
        call_report(s, c, sent=10, idle=not s, at_work=len(ranks), predicted_seconds=c / 2, predicted_bytes=8) for s, c in ranks
    ]
    return CallRecord(seconds=1.0, reports=reports, pids=list(range(len(ranks))), node=None)


def test_the_first_call_counts_only_while_it_is_alone():
    sums = RunStats(None)
    sums.add(record((9.0, 5.0), (9.0, 4.0)))
    assert (sums.count, sums.waiting_share) == (1, 5 / 9)
    for _ in range(3):
        sums.add(record((2.0, 1.0), (1.5, 0.5)))
    assert sums.count == 3
    assert sums.waiting_share == 0.5
    assert sums.rank_0["communication_bytes"] == 30
    assert sums.times == [{"compute": 3.0, "communication": 1.5, "wait": 1.5}, {"compute": 3.0, "communication": 1.5, "wait": 1.5}]


def test_a_rank_that_idles_waits_and_says_nothing_about_the_link():
    (_, idle, _) = times = time_by_rank(record((2.0, 1.0), (0.0, 0.0), (2.0, 0.75)).reports)
    assert idle == {"compute": 0.0, "communication": 0.0, "wait": 2.0}
    assert times[0] == {"compute": 1.0, "communication": 0.75, "wait": 0.25}


def test_other_ranks_begin_new_sums():
    sums = RunStats(None)
    for _ in range(3):
        sums.add(record((2.0, 1.0), (2.0, 1.0)))
    sums.add(record((4.0, 1.0), (4.0, 1.0), (4.0, 1.0)))
    assert (sums.count, len(sums.times), sums.rank_0["seconds"]) == (1, 3, 4.0)


# --- one device against several --------------------------------------------------------------------------------------------


def a_run(key="flux", calls=3):
    """A timer whose calls have ended, of a run on one device called "cpu"."""
    timer = RunStats(key, "cpu")
    for _ in range(calls):
        timer.enter({})
        timer.leave()
    return timer


def test_times_on_one_device_are_kept_by_kind_and_device_for_another_process(tmp_path):
    file = tmp_path / "one_device.json"
    journal = Journal(file)
    assert journal.speed is None
    journal.run = a_run()
    journal.end_run()
    alone = journal.on_one_device
    assert alone == journal.run.per_call > 0
    assert journal.speed.words == "one device"

    again = Journal(file)
    again.run = a_run()
    assert again.on_one_device == alone
    for other in (a_run("wan"), RunStats("flux", "cuda"), RunStats(None, "cpu")):
        if not other.calls:
            other.enter({})
        again.run = other
        assert again.on_one_device is None


def test_two_threads_that_ask_first_share_one_record(tmp_path, monkeypatch):
    """The one that ends a run, and the one that sends the status."""
    journal, other = Journal(tmp_path / "one_device.json"), []

    class Interrupted(KeptSeconds):
        def __init__(self, *args):
            super().__init__(*args)
            if not other:
                other.append(None)
                other[0] = journal._times

    monkeypatch.setattr("cp_runtime.controller.journal.KeptSeconds", Interrupted)
    assert journal._times is other[0]


def test_a_prompt_without_the_pack_clears_the_run_before_it_alone():
    journal = Journal()
    before = journal.run = RunStats("k")
    journal.bypassed(before)
    assert journal.run is not before
    later = journal.run = RunStats("k")
    journal.bypassed(before)
    assert journal.run is later


def test_a_run_of_the_ranks_is_no_run_on_one_device(tmp_path):
    journal = Journal(tmp_path / "one_device.json")
    journal.run = a_run()
    journal.run.add(record((2.0, 1.0), (2.0, 1.0)))
    journal.end_run()
    assert journal.on_one_device is None
    assert journal.speed.words == "not measured yet"


def test_a_call_that_is_repeated_on_one_device_counts_with_what_comes_between_calls(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr("cp_runtime.controller.run_stats.time.monotonic", lambda: now)
    timer = RunStats("flux", "cpu")
    journal = Journal(tmp_path / "one_device.json")
    journal.run = timer
    journal.measure()
    for ranks, repeated in ((9.0, 0.0), (2.0, 6.0), (2.0, 0.0), (2.0, 0.0)):
        timer.enter({})
        now += ranks + repeated
        journal.run.add(record((ranks, 0.1), (ranks, 0.1)))
        if repeated:
            journal.measured(repeated)
        timer.inside(ranks + repeated, repeated)
        timer.leave()
        now += 0.5  # the sampler
    assert not journal.measuring
    assert timer.per_call == pytest.approx((3 * 2.0 + 2 * 0.5) / 3)
    assert journal.on_one_device == 6.5
    assert journal.speed.words == "2.79 × as fast as one device (more than 2 can gain: measure again)"
    assert list(tmp_path.iterdir()) == []  # no file is written between calls
    journal.end_run()
    again = Journal(tmp_path / "one_device.json")
    again.run = timer
    assert again.on_one_device == 6.5


def test_what_cannot_be_measured_says_why_until_another_kind_runs(tmp_path):
    journal = Journal(tmp_path / "one_device.json")
    for key in ("flux", "wan"):
        journal.run = a_run(key)
        journal.run.add(record((2.0, 1.0), (2.0, 1.0)))
        if key == "flux":
            journal.measure()
            journal.measured(None, "one device has too little memory")
            assert journal.speed.words == "not measured: one device has too little memory"
    assert journal.speed.words == "not measured yet"


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (Speed(ranks=2, per_call=1.0, on_one_device=1.87), "1.87 × as fast as one device"),
        (Speed(ranks=2, per_call=1.0, on_one_device=0.926), "0.93 × as fast as one device"),
        (Speed(ranks=1, per_call=1.0, on_one_device=1.0), "one device"),
        (Speed(ranks=2, per_call=None, on_one_device=1.0), "known after two calls"),
        (Speed(ranks=2, per_call=None, on_one_device=None), "not measured yet"),
        (Speed(ranks=2, per_call=1.0, on_one_device=2.004), "2.00 × as fast as one device"),
    ],
)
def test_speed_in_words(speed, words):
    assert speed.words == words


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"version": 2, "machines": {"cpu": {"a": {"time": 1}, "b": {"time": 1, "seconds": "2"}, "c": {"time": 1, "seconds": 0}}}}',
    ],
)
def test_seconds_that_are_none_are_not_there(tmp_path, content):
    file = tmp_path / "one_device.json"
    file.write_text(content)
    kept = KeptSeconds(KeptFile(file), "cpu")
    assert [kept.get(name) for name in "abc"] == [None, None, None]
    kept.put("a", 1.5)
    kept.put("a", 1.51)  # hardly news: every call of a run may say so
    assert kept.get("a") == 1.51
    assert KeptSeconds(KeptFile(file), "cpu").get("a") == 1.5
    kept.put("a", 2.0)
    assert KeptSeconds(KeptFile(file), "cpu").get("a") == 2.0


# --- messages ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            RankError(rank=1, pid=7, kind="RuntimeError", message="no", trace='File "/home/me/x.py", line 3'),
            "rank 1 (pid 7) failed: RuntimeError: no",
        ),
        (
            RankError(rank=0, pid=7, kind="SIGKILL", message="ended.\n\nWhat it wrote last:\n/home/me/x.py"),
            "rank 0 (pid 7) failed: SIGKILL: ended.",
        ),
        (PoolTimeout("Stacks: /tmp/context parallel/stacks.txt. Raise it."), "Stacks: stacks.txt. Raise it."),
        (MirrorError("the model file '/mnt/My Models/sub/x.safetensors' is gone"), "the model file 'x.safetensors' is gone"),
        (MirrorError("speed is 3 steps/s, see https://example.com/a/b"), "speed is 3 steps/s, see https://example.com/a/b"),
        (KeyError(0), "KeyError: 0"),
    ],
)
def test_messages_for_everyone_hold_no_folders_and_no_tracebacks(error, shown):
    assert public_message(error) == shown
