"""Cases 39 to 41: what else happens to a process that runs for weeks."""

import gc
import os
import re
import resource
import signal
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.faults import Stopwatch, wait_for
from support.graphs import flux_prompt
from support.node_graphs import assert_right
from support.pools import echo, make_pool, small_pool
from support.server import ComfyServer

from cp_runtime.errors import PoolError
from cp_runtime.pool import worker_pool

DEADLINE = 4.0


@pytest.fixture(scope="module")
def runtime_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("runtime")


@pytest.fixture(scope="module")
def weeks_server(comfyui_path, checkpoints_dir, runtime_dir):
    env = {"XDG_RUNTIME_DIR": str(runtime_dir), "TMPDIR": str(runtime_dir)}
    with ComfyServer(comfyui_path, models=checkpoints_dir, env=env) as running:
        yield running


@pytest.fixture(scope="module")
def expected(weeks_server):
    return weeks_server.sample(flux_prompt())


def test_a_cleaner_finds_nothing_of_the_pool(weeks_server, expected, runtime_dir):
    """Programs that tidy up temporary folders break pools of ranks that meet in a file: new groups of ranks need it."""
    cp = {"world_size": 4, "step_timeout": DEADLINE}
    pids = assert_right(weeks_server, expected, {**cp, "ulysses_degree": 4})
    assert list(runtime_dir.rglob("context-parallel*")) == []
    assert assert_right(weeks_server, expected, {**cp, "ulysses_degree": 2, "ring_degree": 2}) == pids


def test_comfyui_is_stopped_for_longer_than_a_deadline(weeks_server, expected):
    """A debugger, a frozen container: reports that lie there when it goes on count."""
    cp = {"world_size": 2, "step_timeout": DEADLINE}
    pids = assert_right(weeks_server, expected, cp)
    prompt_id = weeks_server.queue(flux_prompt(cp=cp, width=512, height=512, steps=12))
    weeks_server.wait_for_step(prompt_id)
    os.kill(weeks_server.pid, signal.SIGSTOP)
    time.sleep(DEADLINE + 2)
    os.kill(weeks_server.pid, signal.SIGCONT)
    watch = Stopwatch("40 ComfyUI's process is stopped for longer than D, and goes on")
    weeks_server.wait(prompt_id, 60).check()
    watch.within(20, "the prompt succeeds")
    assert weeks_server.worker_pids() == pids


def test_reports_that_wait_count_after_the_deadline(monkeypatch):
    """The same where the process stands still between two looks at its ranks, for as long as it takes them to report."""
    with small_pool() as pool:
        asked = []

        def monotonic():
            asked.append(time.monotonic())
            if len(asked) == 1:  # the deadline is made of it
                return asked[0]
            if len(asked) == 2:
                time.sleep(1)
            return time.monotonic() + 1000

        monkeypatch.setattr(worker_pool, "time", SimpleNamespace(monotonic=monotonic))
        assert echo(pool, torch.ones(1)) == 1
        assert len(asked) > 1
        assert pool.alive


def start_fails() -> str:
    """The message; the exception itself would keep the pool alive."""
    with pytest.raises(PoolError) as caught:
        make_pool().start()
    return str(caught.value)


@pytest.mark.parametrize("spare", [6, *(pytest.param(spare, marks=pytest.mark.soak) for spare in (0, 3, 9, 13))])
def test_no_more_descriptors(spare):
    """Wherever the start of a pool runs out of them: one clear error, nothing kept, and the next start works."""
    with small_pool() as pool:
        assert echo(pool, torch.ones(1)) == 1
    process = psutil.Process()
    before = process.num_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest + 1 - before)]  # no gaps below the limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(name) for name in os.listdir("/proc/self/fd")) + spare, hard))
    watch = Stopwatch("41 no more file descriptors")
    try:
        error = start_fails()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    watch.within(2, "start fails")
    assert re.search("could not be started: .*Too many open files.*ulimit", error)
    gc.collect()
    wait_for(lambda: process.num_fds() == before, 2)  # threads that read from processes close their pipes at the end of these
    with small_pool() as pool:
        assert echo(pool, torch.ones(1)) == 1
