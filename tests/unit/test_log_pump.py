"""What is kept of the lines that a process writes."""

import os

from cp_runtime.pool.launcher import LogPump


def test_the_line_that_says_what_is_wrong_is_not_lost_among_frames():
    """libtorch writes dozens of frames after it, and a rank's error shows the last lines. Seen on an H200."""
    with LogPump("rank 1") as log:
        frames = [f"frame #{number}: c10::cuda::check(int) + 0x9a (0x7f in libc10_cuda.so)" for number in range(40)]
        os.write(log.fd, "\n".join(["  what():  CUDA error: device-side assert triggered", *frames, "end", ""]).encode())
    assert log.finish() == ["  what():  CUDA error: device-side assert triggered", "end"]
