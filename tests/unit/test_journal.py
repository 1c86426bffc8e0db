"""What displays read: the result of a run, its comparison with one device, and messages that anyone may read."""

import json
import math
import re
from dataclasses import replace

import pytest
from support.reports import call_report

from cp_runtime.controller.journal import Journal, public_message
from cp_runtime.controller.prompt_times import PromptTimes
from cp_runtime.controller.run_stats import CallRecord, Node, RunResult, RunStats, time_by_rank
from cp_runtime.errors import MirrorError, PoolTimeout, RankError
from cp_runtime.timing.times import Times


def record(*ranks):
    """A call in which each rank took (seconds, of these in communication)."""
    reports = [
        call_report(s, c, sent=10, idle=not s, at_work=len(ranks), predicted_seconds=c / 2, predicted_bytes=8) for s, c in ranks
    ]
    return CallRecord(seconds=1.0, reports=reports, pids=list(range(len(ranks))))


TWO = record((2.0, 1.0), (2.0, 1.0))


def test_the_first_call_counts_only_while_it_is_alone():
    run = RunStats(None)
    run.add(record((9.0, 5.0), (9.0, 4.0)))
    assert (run.count, run.result.waiting_share) == (1, 5 / 9)
    for _ in range(3):
        run.add(record((2.0, 1.0), (1.5, 0.5)))
    assert (run.count, run.result.waiting_share, run.result.mean["communication_bytes"]) == (3, 0.5, 10)
    assert run.result.by_rank == [{"compute": 1.0, "communication": 0.5, "wait": 0.5}] * 2
    run.add(record((4.0, 1.0), (4.0, 1.0), (4.0, 1.0)))  # other ranks
    assert (run.count, len(run.result.by_rank), run.result.mean["seconds"]) == (1, 3, 4.0)


def test_a_rank_that_idles_waits_and_says_nothing_about_the_link():
    assert time_by_rank(record((2.0, 1.0), (0.0, 0.0), (2.0, 0.75)).reports) == [
        {"compute": 1.0, "communication": 0.75, "wait": 0.25},
        {"compute": 0.0, "communication": 0.0, "wait": 2.0},
        {"compute": 1.25, "communication": 0.75, "wait": 0.0},
    ]


def test_every_display_describes_the_calls_that_most_shared():
    """A last call on another number of ranks, such as a try on one, has no part in it: neither in words nor in the speed-up."""
    both, one = TWO, replace(TWO, reports=[call_report(at_work=1), call_report(at_work=1, idle=True)], limit=1.0)
    run = RunStats(None)
    for call, shown in ((both, both), (one, both), (one, one), (both, both)):
        run.add(call)
        assert (run.result.last, run.result.limit, run.result.ranks) == (shown, shown.limit, shown.at_work)
    run.add(record((4.0, 1.0), (4.0, 1.0), (4.0, 1.0)))  # other ranks
    assert run.result.ranks == 3


# --- words, parts and JSON of a result ----------------------------------------------------------------------------------------
def result(words, times=None, alone=(), ranks=2, per_call=1.0, **more):
    return pytest.param(RunResult(ranks=ranks, per_call=per_call, alone=alone, **more), times, words, id=words)


ENDED = {"steps": 20, "calls": 20, "per_call": 0.45}
DISTURBED = "the comparison was disturbed, measure again"


@pytest.mark.parametrize(
    ("result", "times", "words"),
    [
        result("1.9 × as fast as one device", 1.87, [1.87]),
        result("0.9 × as fast as one device", 0.926, [0.926]),
        result("on one device", None, [1.0], ranks=1),
        result("known after two calls", None, [1.0], per_call=None),
        result("not compared with one device yet", per_call=None),
        result("not compared with one device: it has too little memory", obstacle="memory"),
        result("about 2.0 × as fast as one process", 2.0, [2.0], unit="process"),
        result("known at the end of the run", None, [1.9], running=True),
        result("known at the end of the run", ranks=1, last=TWO, running=True),  # by which one rank is tried
        result("20 steps in 9 s: 1.0 × as fast as one GPU", 1.0, [0.45], unit="gpu", **ENDED),
        result("2.0 × as fast as one GPU", 2.0, [2.004], unit="gpu"),
        result("about 2.0 × as fast as one process", 2.0, [2.2], unit="process"),  # its attention is slower
        result("about 2.0 × as fast as one process (1.9 to 2.0 in 2 measurements)", 2.0, [1.9, 2.3], unit="process"),
        result(f"not compared with one GPU: {DISTURBED}", None, [2.2], unit="gpu"),
        result("20 steps in 9 s instead of about 17 s: 1.9 × as fast as one GPU", 1.9, [0.855], unit="gpu", **ENDED),
        result(
            "20 steps in 20 s instead of about 37 s: 1.9 × as fast as one GPU (1.8 to 1.9 in 2 measurements)",
            1.85, [0.9, 0.95, 5.0], per_call=0.5, unit="gpu", steps=20, calls=40,
        ),
        result("3.0 × as fast as one device", 3.0, [1.5], per_call=0.5, limit=3.0),  # that one is the slow one
        result("8 steps in 8 s: not compared with one device yet (7 of 8 calls approximate)", steps=8, calls=8, patched=7),
        result(f"8 steps in 3.2 s: not compared with one device: {DISTURBED}", None, [3.0], per_call=0.4, steps=8, calls=8),
        result("1.4 × as fast as one device, which gets its weights from the others, too", 1.4, [0.7], per_call=0.5, fetched=True),
        result("20 steps in 9 s: not compared with one device yet", **ENDED),
        result("20 steps in 9 s: on one GPU", ranks=1, unit="gpu", **ENDED),
    ],
)  # fmt: skip
def test_one_result_in_words_and_figures(result, times, words):
    assert result.words == words
    shown, parts = result.described, result.parts
    assert json.loads(json.dumps(shown)) == {**shown, "words": words, "parts": parts}
    assert shown["times"] == pytest.approx(times)
    assert shown["seconds_per_call"] == result.per_call
    assert ("times" in parts, "steps" in parts) == (times is not None, result.steps > 0 and result.per_call is not None)
    if times is not None:
        assert shown["seconds_per_call_on_one_device"] >= times * result.per_call * 0.999
        assert parts["times"] == f"{times:.1f}" == re.search(r"(\d+\.\d) ×", words)[1]


def test_calls_that_a_step_cache_answers_are_none():
    """Otherwise a run would seem faster than its devices can be."""
    run = RunStats("flux", "cpu")
    for reached in (True, True, False, True, False):
        run.enter({})
        if reached:
            run.add(TWO)
        run.leave()
    run.finish(steps=5)
    assert (run.begun, run.skipped, run.result.calls) == (5, 2, 3)
    assert run.result.per_call == pytest.approx(run.taken / 2, rel=0.5)


# --- one device against several --------------------------------------------------------------------------------------------
def a_run(key="flux", *records):
    """A run on one device called "cpu", or the calls on ranks; it has ended."""
    run = RunStats(key, "cpu")
    for _ in range(3):
        run.enter({})
        run.leave()
    for each in records:
        run.add(each)
    return run


@pytest.fixture
def file(tmp_path):
    return tmp_path / "times.json"


@pytest.fixture
def journal(file):
    return Journal(Times(file))


def kept(file, run):
    """What another process knows of one device, for such a run."""
    journal = Journal(Times(file))
    journal.run = run
    return journal.result.alone


def on_one_rank(journal, seconds):
    """What a call of the run took on one rank, which `Workers` notes."""
    journal.run.one_rank = "one rank"
    journal._times.add(journal.run.kind, "one rank", seconds)


def test_times_on_one_device_are_kept_by_kind_and_device_for_another_process(journal, file):
    assert journal.result is None
    journal.run = a_run("flux", TWO)  # no run on one device
    journal.end_run()
    assert (journal.result.on_one_device, journal.result.case) == (None, "not_measured")
    journal.run = a_run()
    journal.end_run()
    assert (journal.result.on_one_device, journal.result.case) == (journal.run.result.per_call, "one_device")
    assert kept(file, a_run()) == pytest.approx((journal.result.per_call,), rel=1e-5)
    on_one_rank(journal, 100.0)
    assert journal.result.alone == kept(file, a_run())  # a rank has a part of the cores
    other = a_run()
    other.machine = "cuda"
    assert kept(file, a_run("wan")) == kept(file, other) == kept(file, a_run(None)) == ()


def test_a_prompt_without_the_pack_clears_the_run_before_it_alone(journal):
    before = journal.run = RunStats("k")
    journal.bypassed(before)
    later = journal.run
    assert later is not before
    journal.bypassed(before)
    assert journal.run is later


def test_the_repetition_of_a_call_is_no_part_of_its_run(journal, file, monkeypatch):
    now = 0.0
    monkeypatch.setattr("cp_runtime.controller.run_stats.time.monotonic", lambda: now)
    run = journal.run = RunStats("flux", "cpu")
    journal.measure()
    for ranks, repeated in ((9.0, 0.0), (2.0, 6.0), (2.0, 0.0), (2.0, 0.0)):
        run.enter({})
        now += ranks + repeated
        run.add(record((ranks, 0.1), (ranks, 0.1)))
        if repeated:
            on_one_rank(journal, repeated + run.between)
            journal.measured()
        run.inside(ranks + repeated, repeated)
        run.leave()
        now += 0.5  # the sampler
    assert not journal.measuring
    assert journal.result.per_call == pytest.approx((3 * 2.0 + 2 * 0.5) / 3)
    assert (journal.result.alone, journal.result.case) == ((6.5,), "running")
    run.note(running=False)
    assert journal.result.case == "disturbed"
    assert not file.exists()  # none is written between calls
    journal.end_run()
    assert kept(file, run) == (6.5,)


@pytest.mark.parametrize("difference", [math.nan, math.inf, 0.5])
def test_a_difference_that_is_no_number_stays_out_of_the_status(journal, difference):
    """JSON has none, so that a panel would get no status at all. As from latents with NaN."""
    journal.run = a_run()
    journal.measured(difference=difference)
    assert journal.result.described["difference_from_one_device"] == (0.5 if difference == 0.5 else None)


def test_what_cannot_be_measured_says_why_until_another_kind_runs(journal):
    journal.run = a_run("flux", TWO)
    journal.measure()
    journal.measured("memory")
    assert journal.result.obstacle == "memory"
    journal.run = a_run("wan", TWO)
    assert journal.result.obstacle == ""


def test_measurements_count_with_their_median_and_one_that_is_asked_for_begins_anew(journal, file):
    for seconds in (3.0, 2.0, 2.5):
        journal.run = a_run("flux", TWO)
        on_one_rank(journal, seconds)
        journal.measured()
        journal.end_run()
    assert replace(journal.result, per_call=2.0).on_one_device == 2.5
    assert kept(file, journal.run) == journal.result.alone == (3.0, 2.0, 2.5)
    journal.forget()
    assert journal.result.alone == ()
    on_one_rank(journal, 2.0)
    journal.end_run()
    assert kept(file, journal.run) == (2.0,)


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
    journal.run.begun = 1
    assert not journal.is_worth_measuring(call)


# --- errors ------------------------------------------------------------------------------------------------------------------
def test_errors_are_kept_when_they_are_over(journal):
    first, second = (journal.fail(MirrorError(text), Node("p", "7", "KSampler")) for text in ("one", "two"))
    journal.run_succeeded()
    assert journal.last_error is None
    assert list(journal.errors) == [second, first]
    assert first.described.items() >= {"message": "one", "rank": None, "device": None}.items()
    assert first.described["node"] == {"id": "7", "type": "KSampler"}


@pytest.mark.parametrize(("ended", "is_own", "forgotten"), [(False, True, True), (True, True, False), (False, False, False)])
def test_the_next_prompt_with_a_node_of_ours_ends_what_is_said_of_a_failure(journal, ended, is_own, forgotten):
    """A speed of a run before it is not shown again."""
    first, run = PromptTimes("first"), journal.run
    journal.begin_prompt(first, is_own=True)
    first.enter("vae")
    journal.fail(MirrorError("one"), Node("first", "7", "CPVAEDecode"))
    if ended:
        first.leave()
    journal.begin_prompt(PromptTimes("second"), is_own)
    assert (journal.run is not run) == forgotten
    assert (journal.last_error is None) == is_own
    assert (journal.prompt.prompt_id, journal.own_prompt is first) == ("second", not is_own)


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
