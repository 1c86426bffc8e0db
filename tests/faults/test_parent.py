"""Cases 15 to 19: whatever ends the process that owns the ranks, they end with it, and nothing else ends them."""

import os
import pty
import signal
from pathlib import Path

import psutil
import pytest
from faults.owner import Owner
from support.faults import SLACK, SOAK, Faults, Stopwatch, wait_for
from support.graphs import flux_prompt
from support.processes import alive, descendants, wait_gone
from support.server import ComfyServer

CP = {"world_size": 2}
# A rank's interpreter, when it stands still before the first line of its program, until it is let go.
SLOW_INTERPRETER = """
import os, pathlib, runpy, sys, time
if any(argument.endswith("rank_program.py") for argument in sys.orig_argv):
    here = pathlib.Path(__file__).parent
    (here / ("waiting-%d" % os.getpid())).touch()
    while not (here / "go").exists():
        time.sleep(0.005)
runpy.run_path(os.path.join({next_one!r}, "sitecustomize.py"))
"""


def assert_alone(owner, watch, bound, what="no process of it is alive", ignore=()):
    """Nothing that the owner started lives after `bound` seconds."""
    left = owner.wait_alone(bound * SLACK + 1, ignore)
    watch.within(bound, what)
    assert left == []


def start_hung(owner, faults, kind):
    """Start a pool whose rank 1 stands still before it joins the others; rank 0 waits for it."""
    faults.arm(1, kind, at="start")
    number = owner.send("start", pool="a", thread=True)
    faults.wait_taken()
    return number


# --- 15 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["waiting", "busy", "starting", "holding Python's lock", *(["idle"] if SOAK else [])])
def test_sigkill(temp, faults, moment):
    """In "busy" one rank is stopped as well: it cannot run, and must end all the same. "waiting": started ahead of a prompt."""
    with Owner(temp, faults.pool_environment, forked=False) as owner:
        if moment == "waiting":
            owner.ask("wait")
        if moment in ("idle", "busy"):
            pids = owner.ask("start", pool="a")["pids"]
            assert owner.ask("echo", pool="a")["same"]
        if moment == "busy":
            os.kill(pids[1], signal.SIGSTOP)
            owner.send("echo", pool="a", thread=True)
            wait_for(lambda: owner.ask("working_on")["pools"] == ["a"])
        if moment == "starting":
            start_hung(owner, faults, "sleep")
        if moment == "holding Python's lock":
            start_hung(owner, faults, "lock")
            owner.ask("hold_lock")
        assert len(owner.family()) == 3
        watch = Stopwatch(f"15 SIGKILL of the UI process, {moment}")
        os.kill(owner.pid, signal.SIGKILL)
        assert_alone(owner, watch, 2)
        assert list(temp.iterdir()) == []


def test_sigkill_before_a_rank_has_run_a_line(temp, tmp_path, faults):
    """It asks for the signal at its parent's death when that is dead already. Left alone, it would sleep."""
    for rank in range(2):
        faults.arm(rank, "sleep", at="start")
    path = faults.pool_environment["PYTHONPATH"]
    (tmp_path / "sitecustomize.py").write_text(SLOW_INTERPRETER.format(next_one=path.partition(os.pathsep)[0]))
    variables = {**faults.pool_environment, "PYTHONPATH": os.pathsep.join([str(tmp_path), path])}
    with Owner(temp, variables, forked=False) as owner:
        owner.send("start", pool="a", thread=True)
        wait_for(lambda: len(list(tmp_path.glob("waiting-*"))) == 2)
        os.kill(owner.pid, signal.SIGKILL)
        owner.process.wait()
        assert len(owner.family()) == 2
        watch = Stopwatch("15 SIGKILL of the UI process, a rank's interpreter starts")
        (tmp_path / "go").touch()
        assert_alone(owner, watch, 2)


@pytest.fixture(scope="module")
def killed_server(comfyui_path, checkpoints_dir, tmp_path_factory):
    """A server that is started anew by every test that ends it."""
    faults = Faults(tmp_path_factory.mktemp("server_faults"))
    server = ComfyServer(comfyui_path, models=checkpoints_dir, env=faults.environment)
    yield server, faults
    server.close()


@pytest.mark.parametrize("moment", ["in a collective", *(["loading"] if SOAK else [])])
def test_sigkill_of_comfyui(killed_server, moment):
    server, faults = killed_server
    server.start()
    if moment == "loading":
        faults.arm(1, "sleep", at="load")
    else:
        faults.arm(0, "sleep", module=3)  # rank 1 waits for it in the attention of that block, at the latest
    server.queue(flux_prompt(cp=CP))
    faults.wait_taken()
    if moment == "in a collective":
        seen = []

        def waits():
            seen.append([rank["modules"] for rank in server.get("/context_parallel/status")["ranks"]])
            return seen[-1][0] == 3 and len(seen) > 20 and seen[-20] == seen[-1]

        wait_for(waits)
    family = [psutil.Process(server.pid), *descendants(server.pid)]
    assert len(server.workers()) == 2
    watch = Stopwatch(f"15 SIGKILL of ComfyUI, {moment}")
    os.kill(server.pid, signal.SIGKILL)
    left = wait_gone(family, 2 * SLACK + 1)
    watch.within(2, "no process of it is alive")
    assert left == []
    assert server.stop() == []


# --- 16, 17 -----------------------------------------------------------------------------------------------------------


ASKING = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
MOMENTS = (
    [(kind, moment) for kind in ASKING for moment in ("idle", "starting")]
    if SOAK
    else [(signal.SIGTERM, "idle"), (signal.SIGINT, "starting")]
)


@pytest.mark.parametrize(("kind", "moment"), MOMENTS, ids=[f"{kind.name}-{moment}" for kind, moment in MOMENTS])
def test_signals_that_ask(temp, faults, kind, moment):
    """The process ends as it would without ranks: by that signal."""
    with Owner(temp, faults.pool_environment, forked=False) as owner:
        if moment == "idle":
            owner.ask("start", pool="a")
        else:
            start_hung(owner, faults, "sleep")
        assert len(owner.family()) == 3
        watch = Stopwatch(f"16 {kind.name} to the UI process, {moment}")
        os.kill(owner.pid, kind)
        code = owner.process.wait(10 * SLACK)
        watch.within(10, "it has exited")
        assert_alone(owner, watch, 10)
        assert code == -kind, owner.log_text()
        assert list(temp.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "usual"),
    # It catches SIGINT, and ends by the others at once: with full length only, because no code of ours runs then.
    [(signal.SIGINT, 0), *([(signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)] if SOAK else [])],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_signals_that_ask_comfyui(comfyui_path, checkpoints_dir, kind, usual):
    """ComfyUI ends as it does without ranks. SIGINT goes to the whole process group: that is Ctrl-C."""
    group = kind == signal.SIGINT
    with ComfyServer(comfyui_path, models=checkpoints_dir, forked=False) as server:
        server.run(flux_prompt(cp=CP), timeout=120).check()
        ranks = server.workers()
        assert len(ranks) == 2
        printed = len(server.log_text())
        watch = Stopwatch("17 Ctrl-C to ComfyUI's process group" if group else f"16 {kind.name} to ComfyUI")
        (os.killpg if group else os.kill)(server.pid, kind)
        code = server.exit_code(10 * SLACK)
        watch.within(10, "it has exited")
        left = wait_gone(ranks, 10 * SLACK)
        watch.within(10, "no rank is left")
        assert left == []
        assert code == usual
        last = server.log_text()[printed:]
        assert last.count("Stopped server") == (1 if group else 0)
        assert "Traceback" not in last
        assert server.stop() == []


def test_ctrl_c_in_a_terminal(temp):
    """The terminal sends SIGINT to its whole foreground group. The ranks are not in it: the owner asks them to leave, once."""
    ours, theirs = pty.openpty()
    try:
        with Owner(temp) as owner:
            group = owner.ask("terminal", path=os.ttyname(theirs))["foreground"]
            pids = owner.ask("start", pool="a")["pids"]
            assert os.tcgetpgrp(ours) == group == owner.pid
            assert not {os.getpgid(pid) for pid in pids} & {group}
            watch = Stopwatch("17 Ctrl-C in a terminal")
            os.write(ours, b"\x03")
            code = owner.process.wait(10 * SLACK)
            watch.within(10, "it has exited")
            assert_alone(owner, watch, 10)
            assert code == -signal.SIGINT
            owner.end()
            assert owner.log_text().count("pool a is closed, exit codes [0, 0]") == 1
            assert owner.log_text().count("KeyboardInterrupt") == 1  # the owner's own
            assert list(temp.iterdir()) == []
    finally:
        os.close(ours)
        os.close(theirs)


# --- 18, 19 -----------------------------------------------------------------------------------------------------------


def test_started_from_a_thread_that_ends(temp):
    """The kernel's signal at a parent's death comes when the *thread* that started a child ends."""
    with Owner(temp, forked=False) as owner:
        started = owner.ask("start", pool="a", thread=True)
        wait_for(lambda: not Path(f"/proc/{owner.pid}/task/{started['thread']}").exists())
        for _ in range(3):
            assert owner.ask("echo", pool="a")["same"]
        assert all(alive(psutil.Process(pid)) for pid in started["pids"])


def pipes(pid):
    """The pipes that a process holds."""
    return {name for fd in Path(f"/proc/{pid}/fd").iterdir() if (name := os.readlink(fd)).startswith("pipe:")}


def test_a_forked_child_holds_the_pipes_open(temp):
    """Another pack's child inherits the owner's ends of the ranks' pipes: the ranks see no end of file at its death."""
    with Owner(temp) as owner:
        owner.ask("start", pool="a")
        child = owner.ask("fork")["pid"]
        assert len(pipes(owner.pid) & pipes(child)) >= 6
        assert owner.ask("echo", pool="a")["same"]
        watch = Stopwatch("19 SIGKILL of the UI process, a forked child lives on")
        os.kill(owner.pid, signal.SIGKILL)
        assert_alone(owner, watch, 2, "no rank is alive", ignore=[child])
        left = psutil.Process(child)
        assert alive(left)
        left.kill()
