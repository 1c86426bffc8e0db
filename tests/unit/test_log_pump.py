"""What is kept of the lines that a process writes."""

import os

from cp_runtime.pool.launcher import LogPump


def test_the_line_that_says_what_is_wrong_is_not_lost_among_frames():
    """libtorch writes dozens of frames after it, and a rank's error shows the last lines. Seen on an H200."""
    with LogPump("rank 1") as log:
        frames = [f"frame #{number}: c10::cuda::check(int) + 0x9a (0x7f in libc10_cuda.so)" for number in range(40)]
        os.write(log.fd, "\n".join(["  what():  CUDA error: device-side assert triggered", *frames, "end", ""]).encode())
    assert log.finish() == ["  what():  CUDA error: device-side assert triggered", "end"]


def test_the_last_stacks_are_kept_apart():
    with LogPump("rank 1") as log:
        first = ["Timeout (0:00:02)!", "Thread 0x0001 (most recent call first):", '  File "a.py", line 1 in f']
        second = ["Timeout (0:00:02)!", "Thread 0x0002 (most recent call first):", '  File "b.py", line 2 in g', "  ..."]
        os.write(log.fd, "\n".join(["before", *first, *second, "after", ""]).encode())
    assert log.finish() == ["before", "after"]
    assert log.stacks == second[1:]
