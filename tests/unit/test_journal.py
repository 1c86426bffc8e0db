"""What the status and reports are made of: sums instead of lists, and messages that anyone may read."""

import pytest

from cp_runtime.comfy.ui.journal import MAX_KINDS, CallRecord, CallSums, Journal, public_message, time_by_rank
from cp_runtime.comfy.ui.run_timer import RunTimer
from cp_runtime.errors import MirrorError, PoolTimeout, RankError


def record(*ranks):
    """A call in which each rank took (seconds, of these in communication)."""
    reports = [
        {"idle": not s, "seconds": s, "communication": {"seconds": c, "bytes": 10}, "predicted": {"seconds": c / 2, "bytes": 8}}
        for s, c in ranks
    ]
    return CallRecord(seconds=1.0, ended=0.0, reports=reports, pids=list(range(len(ranks))), node=None)


def test_the_first_call_counts_only_while_it_is_alone():
    sums = CallSums()
    sums.add(record((9.0, 5.0), (9.0, 4.0)))
    assert (sums.count, sums.communication_share) == (1, 5 / 9)
    for _ in range(3):
        sums.add(record((2.0, 1.0), (1.5, 0.5)))
    assert sums.count == 3
    assert sums.communication_share == 0.5
    assert sums.rank_0["communication_bytes"] == 30
    assert sums.times == [
        {"compute": 3.0, "communication": 1.5, "wait": 1.5},
        {"compute": 3.0, "communication": 1.5, "wait": 1.5},
    ]


def test_a_rank_that_idles_waits_and_says_nothing_about_the_link():
    (_, idle, _) = times = time_by_rank(record((2.0, 1.0), (0.0, 0.0), (2.0, 0.75)).reports)
    assert idle == {"compute": 0.0, "communication": 0.0, "wait": 2.0}
    assert times[0] == {"compute": 1.0, "communication": 0.75, "wait": 0.25}


def test_other_ranks_begin_new_sums():
    sums = CallSums()
    for _ in range(3):
        sums.add(record((2.0, 1.0), (2.0, 1.0)))
    sums.add(record((4.0, 1.0), (4.0, 1.0), (4.0, 1.0)))
    assert (sums.count, len(sums.times), sums.rank_0["seconds"]) == (1, 3, 4.0)


def test_times_on_one_device_are_bounded():
    journal = Journal()
    for number in range(MAX_KINDS + 5):
        timer = RunTimer(f"k{number}")
        timer.enter({})
        journal.begin_run(timer)
        journal.note_one_device(float(number))
    assert journal.on_one_device == MAX_KINDS + 4
    assert len(journal._one_device) == MAX_KINDS


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
