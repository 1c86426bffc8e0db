"""What the status and reports are made of: sums instead of lists, and messages that anyone may read."""

import math
from dataclasses import replace

import pytest
from support.reports import call_report

from cp_runtime.controller.journal import Journal, public_message
from cp_runtime.controller.run_stats import CallRecord, RunStats, Speed, time_by_rank
from cp_runtime.errors import MirrorError, PoolTimeout, RankError
from cp_runtime.timing.times import Times


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


@pytest.fixture
def file(tmp_path):
    return tmp_path / "times.json"


@pytest.fixture
def journal(file):
    return Journal(Times(file))


def on_one_rank(journal, seconds):
    """What a call of the run took on one rank, which `Workers` notes."""
    journal.run.one_rank = "one rank"
    journal._times.add(journal.run.kind, "one rank", seconds)


def test_times_on_one_device_are_kept_by_kind_and_device_for_another_process(journal, file):
    assert journal.speed is None
    journal.run = a_run()
    journal.end_run()
    alone = journal.speed.on_one_device
    assert alone == journal.run.per_call > 0
    assert journal.speed.words == "on one device"

    again = Journal(Times(file))
    again.run = a_run()
    assert again.alone == pytest.approx((alone,), rel=1e-5)
    for other in (a_run("wan"), RunStats("flux", "cuda"), RunStats(None, "cpu")):
        if not other.calls:
            other.enter({})
        again.run = other
        assert again.alone == ()


def test_a_prompt_without_the_pack_clears_the_run_before_it_alone(journal):
    before = journal.run = RunStats("k")
    journal.bypassed(before)
    assert journal.run is not before
    later = journal.run = RunStats("k")
    journal.bypassed(before)
    assert journal.run is later


def test_a_run_of_the_ranks_is_no_run_on_one_device(journal):
    journal.run = a_run()
    journal.run.add(record((2.0, 1.0), (2.0, 1.0)))
    journal.end_run()
    assert journal.speed.on_one_device is None
    assert journal.speed.words == "not compared with one device yet"


def test_the_repetition_of_a_call_is_no_part_of_its_run(journal, file, monkeypatch):
    now = 0.0
    monkeypatch.setattr("cp_runtime.controller.run_stats.time.monotonic", lambda: now)
    timer = journal.run = RunStats("flux", "cpu")
    journal.measure()
    for ranks, repeated in ((9.0, 0.0), (2.0, 6.0), (2.0, 0.0), (2.0, 0.0)):
        timer.enter({})
        now += ranks + repeated
        journal.run.add(record((ranks, 0.1), (ranks, 0.1)))
        if repeated:
            on_one_rank(journal, repeated + timer.between)
            journal.measured()
        timer.inside(ranks + repeated, repeated)
        timer.leave()
        now += 0.5  # the sampler
    assert not journal.measuring
    assert timer.per_call == pytest.approx((3 * 2.0 + 2 * 0.5) / 3)
    assert (journal.alone, journal.speed.on_one_device) == ((6.5,), None)
    assert journal.speed.words == "not compared with one device: the comparison was disturbed, measure again"
    assert not file.exists()  # none is written between calls
    journal.end_run()
    again = Journal(Times(file))
    again.run = timer
    assert again.alone == (6.5,)


@pytest.mark.parametrize("difference", [math.nan, math.inf])
def test_a_difference_that_is_no_number_stays_out_of_the_status(journal, difference):
    """JSON has none, so that a panel would get no status at all. As from latents with NaN."""
    journal.run = a_run("flux")
    journal.measured(difference=difference)
    assert journal.run.difference is None


def test_what_cannot_be_measured_says_why_until_another_kind_runs(journal):
    for key in ("flux", "wan"):
        journal.run = a_run(key)
        journal.run.add(record((2.0, 1.0), (2.0, 1.0)))
        if key == "flux":
            journal.measure()
            journal.measured("memory")
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
        (Speed(ranks=2, per_call=1.0, alone=[2.004], unit="gpu"), "2.0 × as fast as one GPU"),
        (Speed(ranks=2, per_call=1.0, alone=[2.2], unit="process"), "2.2 × as fast as one process"),  # its attention is slower
        (
            Speed(ranks=2, per_call=1.0, alone=[2.2], unit="gpu"),
            "not compared with one GPU: the comparison was disturbed, measure again",
        ),
        (
            Speed(ranks=2, per_call=0.45, alone=[0.855], unit="gpu", steps=20, calls=20),
            "20 steps in 9 s instead of about 17 s: 1.9 × as fast as one GPU",
        ),
        (
            Speed(ranks=2, per_call=0.5, alone=[0.9, 0.95, 5.0], unit="gpu", steps=20, calls=40),
            "20 steps in 20 s instead of about 37 s: 1.9 × as fast as one GPU (1.8 to 1.9 in 2 measurements)",
        ),
        (Speed(ranks=2, per_call=0.5, alone=[1.5], limit=3.0), "3.0 × as fast as one device"),  # that one is the slow one
        (
            Speed(ranks=2, per_call=1.0, steps=8, calls=8, patched=7),
            "8 steps in 8 s: not compared with one device yet (7 of 8 calls approximate)",
        ),
        (
            Speed(ranks=2, per_call=0.4, alone=[3.0], steps=8, calls=8),
            "8 steps in 3.2 s: not compared with one device: the comparison was disturbed, measure again",
        ),
        (
            Speed(ranks=2, per_call=0.5, alone=[0.7], fetched=True),
            "1.4 × as fast as one device, which gets its weights from the others, too",
        ),
        (Speed(ranks=2, per_call=0.45, steps=20, calls=20), "20 steps in 9 s: not compared with one device yet"),
        (Speed(ranks=1, per_call=0.45, unit="gpu", steps=20, calls=20), "20 steps in 9 s: on one GPU"),
    ],
)
def test_speed_in_words(speed, words):
    assert speed.words == words


def test_one_that_is_asked_for_begins_anew(journal, file):
    journal.run = a_run()
    journal.run.add(record((2.0, 1.0), (2.0, 1.0)))
    on_one_rank(journal, 2.5)
    journal.end_run()
    journal.forget()
    assert journal.alone == ()
    on_one_rank(journal, 2.0)
    journal.end_run()
    again = Journal(Times(file))
    again.run = journal.run
    assert again.alone == (2.0,)


def test_what_was_measured_again_and_again_counts_with_its_median(journal, file):
    for seconds in (3.0, 2.0, 2.5):
        journal.run = a_run()
        journal.run.add(record((2.0, 1.0), (2.0, 1.0)))
        on_one_rank(journal, seconds)
        journal.measured()
        journal.end_run()
    assert replace(journal.speed, per_call=2.0).on_one_device == 2.5
    again = Journal(Times(file))
    again.run = journal.run
    assert again.alone == journal.alone == (3.0, 2.0, 2.5)


def test_runs_are_measured_by_themselves_once_and_where_that_is_a_small_part_of_them(journal, monkeypatch):
    """Two ranks, twenty calls each: the third run is measured."""
    now = 0.0
    monkeypatch.setattr("cp_runtime.controller.run_stats.time.monotonic", lambda: now)
    call, worth = record((1.0, 0.1), (1.0, 0.1)), []
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
    on_one_rank(journal, 2.0)
    assert not journal.is_worth_measuring(call)
    journal.run = RunStats("wan", "cpu")
    journal.run.calls = 1
    assert not journal.is_worth_measuring(call)


def test_errors_are_kept_when_they_are_over(journal):
    first, second = (journal.fail(MirrorError(text), None) for text in ("one", "two"))
    journal.run_succeeded()
    assert journal.last_error is None
    assert list(journal.errors) == [second, first]


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
        (MirrorError(r"the model file 'C:\Users\bob\My Models\x.safetensors' is gone"), "the model file 'x.safetensors' is gone"),
        (MirrorError(r"no \\server\share\x.safetensors, nor D:/models/y.gguf"), "no x.safetensors, nor y.gguf"),
        (MirrorError(r"a pattern \d+ of block: 3\4"), r"a pattern \d+ of block: 3\4"),
        (KeyError(0), "KeyError: 0"),
    ],
)
def test_messages_for_everyone_hold_no_folders_and_no_tracebacks(error, shown):
    assert public_message(error) == shown
