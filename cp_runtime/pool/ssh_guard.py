"""On another computer: a process between ssh and a rank, which ends the rank when the connection ends.

A rank that is stuck in C notices no end of file. This process, which does nothing else, watches the input that the rank reads, and
kills it.
"""

from __future__ import annotations

import os
import select
import signal
import time

GRACE = 1.0  # seconds that a rank gets to end by itself
POLL = 0.1
_HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


def fork_guarded() -> None:
    """Go on in a child of this process. This process waits for its end, and exits as a shell would say how it ended."""
    child = os.fork()
    if child == 0:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):  # at the child's end nobody holds them open
        os.dup2(nothing, fd)
    poller, hung_up = select.poll(), 0.0
    poller.register(0, _HUNG_UP)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        if hung_up:
            time.sleep(POLL)
            if time.monotonic() - hung_up > GRACE:
                os.kill(child, signal.SIGKILL)
        elif poller.poll(POLL * 1000):
            hung_up = time.monotonic()
