"""Frames over pipes, in one process and to a program that has given its standard input and output to them."""

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from support.package import ROOT

from cp_runtime.pool.frames import MAX_HEADER, Frame, Malformed, Outbox, Reader, write


@contextmanager
def pipe():
    ends = os.pipe()
    try:
        yield ends
    finally:
        for fd in ends:
            with suppress(OSError):  # closed by the test
                os.close(fd)


def test_frames_arrive_whole_and_in_order():
    frames = [Frame(b"x" * 1000, b"body" * number, bool(number % 2)) for number in range(3)]
    with pipe() as (source, target):
        for frame in frames:
            write(target, frame)
        os.close(target)
        reader = Reader(source)
        found = [reader.read() for _ in range(4)]
    assert found == [*frames, None]


def test_nothing_waits_for_a_reader_and_all_arrives():
    with pipe() as (source, target):
        outbox, began = Outbox(os.dup(target)), time.monotonic()
        os.close(target)
        for number in range(3):
            outbox.put(Frame(b"y" * (8 << 20), bytes([number])))
        outbox.close()
        assert time.monotonic() - began < 1
        reader = Reader(source)
        found = [reader.read() for _ in range(4)]
    assert [frame and bytes(frame.body) for frame in found] == [b"\0", b"\1", b"\2", None]
    assert len(found[0].header) == 8 << 20


def test_a_frame_cut_off_by_death_is_never_returned():
    head = struct.pack("<QQ?", 9, 100, False)
    for given in (b"", b"abc", head + b'{"seq"', head + b'{"seq":1}' + b"half"):
        with pipe() as (source, target):
            os.write(target, given)
            os.close(target)
            assert Reader(source).read() is None


def test_no_header_is_longer_than_the_limit():
    with pipe() as (source, target):
        os.write(target, struct.pack("<QQ?", MAX_HEADER + 1, 0, False))
        with pytest.raises(Malformed, match="above the limit"):
            Reader(source).read()


PROGRAM = """
import ctypes, os, sys, threading
sys.path.insert(0, {tests!r})
from support.package import load_package
load_package()
from cp_runtime.pool.frames import Frame, Inbox
made, busy = threading.Event(), threading.Event()
def tell(what):
    return lambda frame: made.wait() and inbox.send(Frame(what + frame.header))
inbox = Inbox(lambda: os._exit(7), tell(b"urgent "), tell(b"seen "))
made.set()
while True:
    frame = inbox.get()
    if frame.header == b"print":
        print("from Python", flush=True)
        os.write(1, b"x" * (1 << 20))
        libc = ctypes.CDLL(None)
        libc.printf(b"from C\\n")
        libc.fflush(None)
        os.system("echo from a program; cat")
    if frame.header == b"fork" and os.fork() == 0:
        import time
        time.sleep(60)
        os._exit(0)
    if frame.header == b"wait":
        busy.wait()
    inbox.send(Frame(b"done " + frame.header, bytes(frame.body)))
"""


@pytest.fixture
def program():
    """A process with an inbox, and what reads from it."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(tests=str(ROOT / "tests"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    printed = []
    reader = threading.Thread(target=lambda: printed.append(process.stderr.read()))
    reader.start()
    yield process, printed, reader, Reader(process.stdout.fileno())
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join()
    for file in (process.stdin, process.stdout, process.stderr):
        file.close()


def test_what_is_printed_comes_between_no_frames(program):
    process, printed, reader, told = program
    write(process.stdin.fileno(), Frame(b"print", b"123"))
    assert told.read().header == b"seen print"
    assert told.read() == Frame(b"done print", b"123")
    process.stdin.close()
    assert process.wait(10) == 7
    reader.join(10)
    assert b"from Python\n" + b"x" * (1 << 20) + b"from C\n" + b"from a program\n" in printed[0]


def test_what_is_urgent_waits_for_nothing(program):
    process, *_, told = program
    write(process.stdin.fileno(), Frame(b"wait"))
    write(process.stdin.fileno(), Frame(b"later"))
    write(process.stdin.fileno(), Frame(b"now", urgent=True))
    assert [told.read().header for _ in range(3)] == [b"seen wait", b"seen later", b"urgent now"]
    process.stdin.close()
    assert process.wait(10) == 7


def test_a_child_holds_no_pipe_open(program):
    """It lives longer than the process that is killed, whose end is known at once."""
    process, *_, told = program
    write(process.stdin.fileno(), Frame(b"fork"))
    assert [told.read().header for _ in range(2)] == [b"seen fork", b"done fork"]
    process.kill()
    assert told.read() is None
