"""What is kept on disk of what calls took: by machine, for several processes, and whatever lies there instead."""

import errno
import fcntl
import json
import math
import multiprocessing
import os
import random
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.faults import SOAK
from support.machines import ALONE, FAST, all_ranks, everywhere, took, work

from cp_runtime.controller.calls import CallTimes
from cp_runtime.engine.policy import TRIES, CallSplit, Known, Run
from cp_runtime.pool.kept import MAX_BYTES, MAX_ENTRIES, PATIENCE, KeptFile, KeptSamples

ALL = all_ranks(FAST)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a machine that is busy, a write may be given up. Only the tests of that have the patience that a prompt has."""
    monkeypatch.setattr("cp_runtime.pool.kept.PATIENCE", 60.0)


@pytest.fixture
def patience_of_a_prompt(patience, monkeypatch):
    monkeypatch.setattr("cp_runtime.pool.kept.PATIENCE", PATIENCE)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "calls.json"


def some(seconds=1.0):
    known = Known(work(items=2), ALL)
    known.runs = {ALL: Run(seconds, 0.5, 0.25, 3), CallSplit((0, 2), 2, 1, 1): Run(2.0, 1.0, 0.5, 1)}
    return known


def keep(file, kind="flux", known=None, machine="m"):
    times = CallTimes(machine, 4, file)
    times[kind] = known or some()
    times.save(kind)
    return times


def kept(file, kind="flux", machine="m"):
    """What another process finds."""
    return CallTimes(machine, 4, file).get(kind)


def test_a_file_that_cannot_be_read_for_a_moment_keeps_its_entries(file, monkeypatch):
    keep(file)
    with monkeypatch.context() as patch:
        patch.setattr("cp_runtime.pool.kept.json.loads", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "a network's disk")))
        assert kept(file) is None
        keep(file, "wan")
    assert kept(file) is not None
    assert kept(file, "wan") is None


def test_times_are_kept_by_machine(tmp_path):
    file = tmp_path / "new" / "calls.json"
    keep(file, machine="two 4090")
    assert kept(file, machine="two 4090") == some()
    assert kept(file, machine="two 3090") is kept(file, "wan", machine="two 4090") is None
    assert [path.name for path in file.parent.iterdir() if path.suffix not in (".json", ".lock")] == []


def test_a_first_run_on_all_ranks_is_not_held_against_them_in_another_session(file):
    """It was far slower than one device, once."""
    known = Known(work(16384), ALL)
    run = took(known.work, FAST, ALL)
    known.note(ALL, replace(run, seconds=run.seconds + 60, communication=run.communication + 60))
    assert known.choose(FAST, everywhere) == ALONE
    for _ in range(2):
        known.note(ALONE, took(known.work, FAST, ALONE))
    keep(file, known=known)
    again = kept(file)
    assert list(again.runs) == [ALONE]
    assert ALL in [split for _, split in again.predictions(FAST)[:3]]


GONE = object()
# By part of an entry: what its fields must not be.
WRONG = {
    "entry": [{"runs": 3}, {"default": GONE}],
    "default": [{"ranks": [0, 1]}],
    "split": [{"ranks": [1, 0]}, {"ranks": []}, {"ranks": [0, 1, 2, 3, 4]}, {"batch": 0}, {"ring": "2"}],
    # JSON has no number for how many times as long as 1e-320 s others take.
    "run": [{"seconds": -1}, {"seconds": 0}, {"seconds": 1e-320}, {"compute": math.nan}, {"more": 1}],
    "work": [
        {"items": GONE}, {"items": 10**400}, {"sequence": 1}, {"operations": math.inf}, {"operations": "1"},
        {"attentions": [[1, 2]]}, {"attentions": [[asdict(work().attentions[0][0]), 1]] * 1000},
    ],
    # No heads, fewer than of keys, and a prime number of them: minutes of trying.
    "shape": [{"heads": 0}, {"heads": 12}, {"heads": 2**31 - 1, "kv_heads": 1}],
}  # fmt: skip


@pytest.mark.parametrize(("part", "wrong"), [(part, wrong) for part, each in WRONG.items() for wrong in each])
def test_an_entry_that_is_none_is_not_there(file, part, wrong):
    for kind in ("bad", "good"):
        keep(file, kind)
    content = json.loads(file.read_text())
    entry = content["machines"]["m"]["bad"]
    (split, run), *_ = entry["runs"]
    parts = {**entry, "entry": entry, "split": split, "run": run, "shape": entry["work"]["attentions"][0][0]}
    parts[part].update(wrong)
    for name in [name for name, value in wrong.items() if value is GONE]:
        del parts[part][name]
    file.write_text(json.dumps(content))
    assert (kept(file, "bad"), kept(file, "good")) == (None, some())


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"version": 0, "machines": {"m": {}}}', '{"version": 2}', '{"version": 2, "machines": 3}']
)
def test_a_file_that_is_none_is_replaced(file, text):
    file.write_text(text)
    assert kept(file) is None
    keep(file)
    assert kept(file) == some()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    assert keep(tmp_path / "file" / "calls.json").get("flux") == some()


def _keep_ten(file, name):
    for number in range(1, 11):
        keep(file, f"{name} {number}", some(number))


def test_several_processes_lose_nothing(file):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_keep_ten, args=(file, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    numbers = range(1, 11)
    assert [kept(file, f"{name} {number}") for name in "abc" for number in numbers] == [some(n) for _ in "abc" for n in numbers]


@pytest.mark.usefixtures("patience_of_a_prompt")
def test_a_lock_that_is_held_delays_nobody(file, monkeypatch):
    """By a ComfyUI that was stopped, say. The figure is dropped, and the next one is written."""
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = threading.Thread(target=keep, args=[file], daemon=True)
        done.start()
        done.join(10)  # 0.2 s, and what a busy machine adds
        assert not done.is_alive()
        assert kept(file) is None
    monkeypatch.setattr("cp_runtime.pool.kept.PATIENCE", 60.0)
    keep(file)
    assert kept(file) == some()


@pytest.mark.usefixtures("patience_of_a_prompt")
def test_a_file_system_that_hangs_delays_nobody(file, monkeypatch):
    """A read that never returns is waited for once; afterwards nothing is known, and nothing is asked."""
    asked, answer = [], threading.Event()
    monkeypatch.setattr("cp_runtime.pool.kept._hung", None)
    monkeypatch.setattr("cp_runtime.pool.kept.KeptFile._read", lambda self: asked.append(1) or (answer.wait(30) and {}))
    for _ in range(3):
        assert kept(file) is None
    keep(file)
    answer.set()
    assert len(asked) == 1


def _loop(file):
    file.symlink_to(file)


def _large(file):
    with open(file, "wb") as sparse:
        sparse.truncate(1 << 40)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, _loop, _large])
def test_what_is_no_file_counts_as_absent_and_nothing_is_left(file, make):
    make(file)
    keep(file)
    assert kept(file) == (None if make is Path.mkdir else some())
    assert {path.name for path in file.parent.iterdir()} <= {"calls.json", "calls.lock"}


@pytest.mark.parametrize("make", [os.mkfifo, _loop, lambda file: file.symlink_to(file.with_name("elsewhere"))])
def test_what_is_in_the_way_of_the_new_file_goes(file, monkeypatch, make):
    """Nobody waits for a reader of a pipe, and nothing is written where a link leads."""
    monkeypatch.setattr("cp_runtime.pool.kept._hung", None)
    make(file.with_suffix(".new"))
    keep(file).save("flux")
    assert kept(file) == some()
    assert {path.name for path in file.parent.iterdir()} == {"calls.json", "calls.lock"}


def test_a_file_is_read_that_is_as_large_as_it_gets_and_none_much_larger(file):
    """While JSON is read, nothing else runs in ComfyUI's process: 16 MB take seconds."""
    known = Known(replace(work(4608), attentions=work(4608).attentions * 5), ALL)
    known.runs = {CallSplit((0, 1, 2, 3), 1, 1, number): Run(1 / 3, 1 / 3, 1 / 3, 1000) for number in range(TRIES)}
    times = keep(file, "0" * 16, known)
    assert file.stat().st_size * MAX_ENTRIES < MAX_BYTES
    content = json.loads(file.read_text())
    content["machines"] |= {"m": {"more": {"time": 1, "seconds": 1, "more": [[]] * 600_000}}, "empty": {}}
    file.write_text(json.dumps(content))
    assert KeptFile(file).read("m") == {}
    times.save("0" * 16)
    assert file.stat().st_size < 10_000


FILES = 1000 if SOAK else 300
ODD = [None, True, -1, 0, 3, 1.5, 1e400, float("nan"), 10**30, "1", "", [], {}, [0, 1, 2, 3], {"ranks": [0]}]


def _places(value):
    """Every (container, key) in nested lists and dicts."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def test_no_file_breaks_a_prompt(file):
    """Hundreds of files in which fields have another value, are gone, or the text is cut off or changed."""
    draw = random.Random(0)
    keep(file)
    KeptFile(file).put("m", "seconds", {"samples": [1.5]})
    text, read = file.read_text(), 0
    for _ in range(FILES):
        content = json.loads(text)
        for _ in range(draw.randint(1, 2)):
            where, key = draw.choice(list(_places(content)))
            if draw.random() < 0.2:
                del where[key]
            else:
                where[key] = draw.choice(ODD)
        changed = json.dumps(content)
        if draw.random() < 0.1:
            at = draw.randrange(len(changed))
            changed = changed[:at] + draw.choice(["", "\x00", "9" * 5000, "[" * 100_000]) + changed[at + draw.randint(0, 1) :]
        file.write_text(changed)
        seconds = KeptSamples(KeptFile(file), "m").get("seconds", ())
        assert all(0 < each < 1e9 for each in seconds)
        known = kept(file)
        if known is not None and known.runs:
            read += 1
            assert max(known.choose(FAST, everywhere).ranks) < 4
            known.note(ALL, Run(1.0, 0.5, 0.25))
            assert known.alternative(FAST, 1)[0] > 0
    assert 0.01 * FILES < read < 0.99 * FILES


def test_the_oldest_go(file, monkeypatch):
    monkeypatch.setattr("cp_runtime.pool.kept.MAX_ENTRIES", 3)
    for kind in "abcde":
        keep(file, kind)
    assert [kind for kind in "abcde" if kept(file, kind)] == ["c", "d", "e"]
    assert MAX_ENTRIES >= 100
