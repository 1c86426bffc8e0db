"""What the status and reports are made of: sums instead of lists, and messages that anyone may read."""

import random

import pytest
from support.reports import call_report

from cp_runtime.controller.journal import Journal, public_message
from cp_runtime.controller.run_stats import CallRecord, RunStats, Speed, time_by_rank
from cp_runtime.errors import MirrorError, PoolTimeout, RankError
from cp_runtime.pool.kept import KeptFile, KeptSamples


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
    alone = journal.speed.on_one_device
    assert alone == journal.run.per_call > 0
    assert journal.speed.words == "on one device"

    again = Journal(file)
    again.run = a_run()
    assert again.alone == (alone,)
    for other in (a_run("wan"), RunStats("flux", "cuda"), RunStats(None, "cpu")):
        if not other.calls:
            other.enter({})
        again.run = other
        assert again.alone == ()


def test_two_threads_that_ask_first_share_one_record(tmp_path, monkeypatch):
    """The one that ends a run, and the one that sends the status."""
    journal, other = Journal(tmp_path / "one_device.json"), []

    class Interrupted(KeptSamples):
        def __init__(self, *args):
            super().__init__(*args)
            if not other:
                other.append(None)
                other[0] = journal._times

    monkeypatch.setattr("cp_runtime.controller.journal.KeptSamples", Interrupted)
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
    assert journal.speed.on_one_device is None
    assert journal.speed.words == "not compared with one device yet"


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
    assert journal.speed.on_one_device == 6.5
    assert journal.speed.words == "2.8 × as fast as one device (more than 2 can gain: measure again)"
    assert list(tmp_path.iterdir()) == []  # no file is written between calls
    journal.end_run()
    again = Journal(tmp_path / "one_device.json")
    again.run = timer
    assert again.alone == (6.5,)


def test_what_cannot_be_measured_says_why_until_another_kind_runs(tmp_path):
    journal = Journal(tmp_path / "one_device.json")
    for key in ("flux", "wan"):
        journal.run = a_run(key)
        journal.run.add(record((2.0, 1.0), (2.0, 1.0)))
        if key == "flux":
            journal.measure()
            journal.measured(None, "memory")
            assert journal.speed.words == "not compared with one device: it has too little memory"
    assert journal.speed.words == "not compared with one device yet"


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (Speed(ranks=2, per_call=1.0, alone=[1.87]), "1.9 × as fast as one device"),
        (Speed(ranks=2, per_call=1.0, alone=[0.926]), "0.9 × as fast as one device"),
        (Speed(ranks=1, per_call=1.0, alone=[1.0]), "on one device"),
        (Speed(ranks=2, per_call=None, alone=[1.0]), "known after two calls"),
        (Speed(ranks=2, per_call=None), "not compared with one device yet"),
        (Speed(ranks=2, per_call=1.0, alone=[2.004], unit="process"), "2.0 × as fast as one process"),
        (
            Speed(ranks=2, per_call=0.45, alone=[0.855], unit="gpu", steps=20, calls=20),
            "20 steps in 9 s instead of about 17 s: 1.9 × as fast as one GPU",
        ),
        (
            Speed(ranks=2, per_call=0.5, alone=[0.9, 0.95, 5.0], unit="gpu", steps=20, calls=40),
            "20 steps in 20 s instead of about 38 s: 1.9 × as fast as one GPU (1.8 to 10.0 in 3 measurements)",
        ),
        (Speed(ranks=2, per_call=0.45, steps=20, calls=20), "20 steps in 9 s: not compared with one device yet"),
        (Speed(ranks=1, per_call=0.45, unit="gpu", steps=20, calls=20), "20 steps in 9 s: on one GPU"),
    ],
)
def test_speed_in_words(speed, words):
    assert speed.words == words


def test_no_two_numbers_of_a_sentence_contradict_each_other():
    draw = random.Random(1)
    for _ in range(2000):
        speed = Speed(ranks=9, per_call=10 ** draw.uniform(-3, 2), alone=[10 ** draw.uniform(-3, 2)], steps=20, calls=20)
        if 0.05 < speed.times < 50:
            parts = speed.parts
            assert f"{float(parts['alone']) / float(parts['seconds']):.1f}" == parts["times"] == f"{speed.times:.1f}"


def test_what_was_measured_again_and_again_counts_with_its_median(tmp_path):
    file = tmp_path / "one_device.json"
    journal = Journal(file)
    for seconds in (6.0, 2.0, 2.5):
        journal.run = a_run()
        journal.run.add(record((2.0, 1.0), (2.0, 1.0)))
        journal.measured(seconds)
        journal.end_run()
    assert journal.speed.on_one_device == pytest.approx(2.5, abs=0.01)
    again = Journal(file)
    again.run = journal.run
    assert again.alone == journal.alone
    assert len(again.alone) == 3


def test_runs_are_measured_by_themselves_once_and_where_that_is_a_small_part_of_them(tmp_path, monkeypatch):
    """Two ranks, twenty calls each: the third run is measured."""
    now = 0.0
    monkeypatch.setattr("cp_runtime.controller.run_stats.time.monotonic", lambda: now)
    journal, call = Journal(tmp_path / "one_device.json"), record((1.0, 0.1), (1.0, 0.1))
    worth = []
    for _ in range(3):
        journal.run = RunStats("flux", "cpu")
        for _ in range(20):
            journal.run.enter({})
            now += 1.0
            journal.run.add(call)
            journal.run.leave()
            worth.append(journal.is_worth_measuring(call))
        journal.end_run()
    assert worth.index(True) == 42  # a call of one device takes two seconds: 5 % of forty, and first calls warm up
    journal.measured(2.0)
    assert not journal.is_worth_measuring(call)
    journal.run = RunStats("wan", "cpu")
    journal.run.calls = 1
    assert not journal.is_worth_measuring(call)


def test_errors_are_kept_when_they_are_over():
    journal = Journal()
    first, second = (journal.fail(MirrorError(text), None) for text in ("one", "two"))
    journal.did_well()
    assert journal.last_error is None
    assert list(journal.errors) == [second, first]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"version": 2, "machines": {"cpu": {"a": {"time": 1}, "b": {"time": 1, "samples": "2"}, '
        '"c": {"time": 1, "samples": [0]}}}}',
    ],
)
def test_seconds_that_are_none_are_not_there(tmp_path, content):
    file = tmp_path / "one_device.json"
    file.write_text(content)
    kept = KeptSamples(KeptFile(file), "cpu")
    assert [kept.get(name) for name in "abc"] == [None, None, None]
    kept.add("a", 1.5)
    kept.add("a", 1.51)
    assert kept["a"] == KeptSamples(KeptFile(file), "cpu")["a"] == (1.5, 1.51)


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
