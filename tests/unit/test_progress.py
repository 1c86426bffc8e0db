"""What a rank tells of itself while it works, and when it writes its stacks."""

import faulthandler
import subprocess
import sys
import time

import pytest
from support.faults import wait_for
from support.package import ROOT

from cp_runtime.pool.messages import Beat
from cp_runtime.pool.progress import BEAT, Notes, Watch


@pytest.fixture
def armed(monkeypatch):
    """Seconds until the timer goes off, None = it will not."""
    seconds = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda timeout, file: seconds.append(timeout))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: seconds.append(None))
    return seconds


def test_what_takes_long_is_told_at_once(monkeypatch, armed):
    monkeypatch.setattr("cp_runtime.pool.progress.BEAT", 60)
    told = []
    notes = Notes(lambda *beat: told.append(beat), lambda: 5, Watch(), 100.0)
    wait_for(lambda: told)
    assert told == [(Beat(collectives=5), 0)]
    notes.begin(7, 10.0)
    notes.modules += 3
    for thousandths in (0, 200, 900, None):
        notes.load(thousandths)
    notes.compiling(2)
    notes.compiling(0)
    assert [(beat.modules, beat.loaded, beat.has_loaded, beat.compiling, command) for beat, command in told[1:]] == [
        (3, 0, True, 0, 7),
        (3, None, True, 0, 7),
        (3, None, True, 2, 7),
        (3, None, True, 0, 7),
    ]
    notes.begin()
    notes.load(1)
    assert told[-1] == (Beat(collectives=5, loaded=1, has_loaded=True), 0)


def test_beats_come_by_themselves(armed):
    told = []
    Notes(lambda *beat: told.append(beat), lambda: len(told), Watch(), 100.0)
    began = time.monotonic()
    wait_for(lambda: len(told) >= 4)
    assert time.monotonic() - began > 2 * BEAT
    assert [beat.collectives for beat, _ in told[:4]] == [0, 1, 2, 3]


def test_the_timer_follows_the_command(armed):
    watch, now = Watch(), time.monotonic()
    watch.until(now + 100)
    assert armed == [pytest.approx(100, abs=1)]
    watch.until(0.0)
    watch.until(now + 101)  # the next command, within the same call of `look`: no new timer
    assert len(armed) == 1
    watch.look()
    assert armed[1:] == [pytest.approx(101, abs=1)]
    watch.until(now + 50)  # this one is earlier
    assert armed[2:] == [pytest.approx(50, abs=1)]
    watch.extend(500)
    watch.look()
    assert armed[3:] == [pytest.approx(550, abs=1)]
    watch.until(0.0)
    watch.look()
    watch.look()
    assert armed[4:] == [None]


def test_loading_and_compiling_allow_more_time(monkeypatch, armed):
    monkeypatch.setattr("cp_runtime.pool.progress.BEAT", 60)
    watch = Watch()
    notes = Notes(lambda *_: None, int, watch, load_timeout=100.0)
    notes.begin(1, 10.0)
    watch.until(time.monotonic() + 10.0)
    notes.load(0)
    watch.look()
    assert armed[-1] == pytest.approx(100, abs=1)
    notes.compiling(1)
    time.sleep(0.2)
    notes.compiling(0)
    assert watch._until - time.monotonic() == pytest.approx(100.0, abs=0.1)  # 0.2 s have passed


HANG = """
import sys, time
sys.path.insert(0, {tests!r})
from support.package import load_package
load_package()
from cp_runtime.pool.progress import Watch
from support.faulty_worker import KINDS
Watch().until(time.monotonic() + 0.3)
KINDS[sys.argv[1]]()
"""


@pytest.mark.parametrize("kind", ["sleep", "spin", "lock"])
def test_stacks_are_written_whatever_the_process_does(kind):
    """Also while its main thread holds the GIL in C."""
    process = subprocess.Popen(
        [sys.executable, "-c", HANG.format(tests=str(ROOT / "tests")), kind], stderr=subprocess.PIPE, text=True
    )
    try:
        lines = [process.stderr.readline() for _ in range(3)]
        assert lines[0].startswith("Timeout (0:00:00")
        assert "most recent call first" in lines[1]
        assert "faulty_worker.py" in lines[2]
    finally:
        process.kill()
        process.communicate()
