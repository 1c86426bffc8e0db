"""What ssh does: how ranks there start, what is said where they do not, and how they end."""

import json
import re
import shutil
import signal
import subprocess
import time

import psutil
import pytest
from machines.conftest import THERE, TWO, cable
from support.faults import Stopwatch, wait_for
from support.graphs import flux_prompt
from support.latents import assert_close
from support.package import ROOT
from support.sshd import PORT
from support.vae_graphs import vae_prompt


def test_weight_patches_and_the_next_prompts(two):
    """They go by value; ranks stay, and get what changes."""
    for strength in (0.8, 0.3):
        settings = {"cfg": 3.0, "loras": [("flux_lora", strength)]}
        stock = two.server.sample_once(flux_prompt(**settings))
        assert_close(two.server.sample(two.prompt()(**settings), timeout=120), stock)
    assert len(two.ssh()) == 1


def test_a_vae(two):
    stock = two.server.sample(vae_prompt("wan", "decode", None))
    assert_close(two.server.sample(vae_prompt("wan", "decode", "exact", devices=TWO), timeout=120), stock)


def test_only_what_ranks_connect_by_listens(two, expected):
    """gloo, on the address between the two, and ssh's forward of the store on loopback."""
    assert_close(two.server.sample(two.prompt()(), timeout=120), expected)
    here = [psutil.Process(two.server.pid), *psutil.Process(two.server.pid).children(recursive=True)]
    ours = {c.laddr for each in here for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert {address.ip for address in ours} == {"10.77.0.1", "127.0.0.1"}
    assert {address.port for address in ours if address.ip == "127.0.0.1"} - {two.server.port} != set()  # the store
    found = subprocess.run(["ip", "netns", "exec", THERE, "ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    there = {line.split()[3] for line in found.splitlines()} - {f"10.77.0.2:{PORT}"}
    assert {address.rpartition(":")[0] for address in there} <= {"10.77.0.2", "127.0.0.1", "[::1]"}
    assert any(address.startswith("10.77.0.2:") for address in there)


RANK_FAULTS = {
    "error": "RuntimeError: injected: error",
    "kill": "SIGKILL: the process ended with SIGKILL",
    "uncaught": "BaseException: injected: uncaught",
    "sleep": "is furthest behind",
    "lock": "is furthest behind",
}


@pytest.mark.parametrize("kind", RANK_FAULTS)
def test_a_rank_there_that_fails_is_named(kind, two, expected):
    hangs = kind in ("sleep", "lock")
    prompt = two.prompt(step_timeout=4.0 if hangs else 60.0)
    assert_close(two.server.sample(prompt(), timeout=120), expected)
    before = two.ranks_there()
    pid = two.server.status()["ranks"][1]["pid"]
    two.faults.arm(1, kind, module=3)
    message = two.server.fails(prompt(), RANK_FAULTS[kind], timeout=60).exception_message
    assert f"rank 1 (pid {pid})" in message
    assert ("faulty_worker.py" in message) == (kind not in ("kill", "uncaught"))
    if kind not in ("error",):
        watch = Stopwatch(f"ssh, {kind}")
        assert psutil.wait_procs(before, 5)[1] == []
        watch.within(3, "nothing of it runs there any more")
    assert_close(two.server.sample(prompt(), timeout=120), expected)


LOST = {
    "ssh is killed": (lambda two: two.ssh()[0].kill(), 2, 3),
    "cable pulled": (lambda two: cable(False), 8, 13),
}


@pytest.mark.parametrize("fault", LOST)
def test_a_connection_that_ends_fails_the_prompt_and_the_rank_there_ends(fault, two, expected):
    act, bound, bound_there = LOST[fault]
    assert_close(two.server.sample(two.prompt()(), timeout=120), expected)
    before = two.ranks_there()
    running = two.server.queue(two.prompt()(steps=900, width=256, height=256))
    two.server.wait_for_step(running)
    watch = Stopwatch(f"ssh, {fault}")
    try:
        act(two)
        failed = two.server.wait(running, timeout=60)
        watch.within(bound, "to the error")
        assert failed.error is not None
        assert psutil.wait_procs(before, 20)[1] == []
        watch.within(bound_there, "nothing of it runs there any more")
    finally:
        cable(True)
    assert_close(two.server.sample(two.prompt()(), timeout=120), expected)


def test_cancel_in_the_middle_of_a_call(two, expected):
    assert_close(two.server.sample(two.prompt()(), timeout=120), expected)
    pids = [rank["pid"] for rank in two.server.status()["ranks"]]
    for rank in (0, 1):
        two.faults.arm(rank, "slow", module=1, seconds=0.5)
        prompt_id = two.server.queue(two.prompt()(width=80))
        two.faults.wait_taken()
        time.sleep(0.7)
        watch = Stopwatch(f"ssh, Cancel inside a call, rank {rank} is slow")
        two.server.interrupt()
        assert two.server.wait(prompt_id, 30).status == "interrupted"
        watch.within(2, "the prompt ends")
    assert_close(two.server.sample(two.prompt()(), timeout=120), expected)
    assert [rank["pid"] for rank in two.server.status()["ranks"]] == pids


def test_what_is_not_there_is_said(two, expected):
    """Before any rank computes; the next prompt runs."""
    two.server.fails(two.prompt("cpu,nowhere/cpu")(), r"ssh -o BatchMode=yes nowhere true", timeout=60)
    key = two.host.folder / "user.pub"
    text = key.read_text()
    key.write_text("")
    try:
        two.server.answer("/context_parallel/restart", "POST")
        error = two.server.fails(two.prompt()(), "Permission denied", timeout=60).exception_message
        assert "the computer pc2: ssh did not start a rank there" in error
    finally:
        key.write_text(text)
    assert_close(two.server.sample(two.prompt()(), timeout=120), expected)


def look(two, host):
    code, answer = two.server.answer("/context_parallel/hosts", "POST", data=json.dumps({"host": host}).encode())
    assert code == 200
    return answer


def test_the_panel_looks_at_a_computer_without_a_rank(two, expected):
    """And says what a prompt would; what runs there goes on."""
    assert_close(two.server.sample(two.prompt()(), timeout=120), expected)
    ranks = two.ranks_there()
    found = look(two, "pc2")
    assert (found["state"], found["reason"]) == ("ready", "")
    assert found["devices"] == [{"name": "pc2/cpu", "title": "", "memory": 0}]
    assert [(each["host"], each["state"]) for each in found["status"]["hosts"]] == [("pc2", "working")]
    wait_for(lambda: two.ranks_there() == ranks, 10)
    watch = Stopwatch("ssh, a computer that does not answer is looked at")
    found = look(two, "10.77.0.9")
    watch.within(11, "to the answer")
    assert found["state"] == "not reached"
    assert "ssh did not start a rank there. It may sleep, or be switched off." in found["reason"]
    key = two.host.folder / "user.pub"
    text = key.read_text()
    key.write_text("")
    try:
        found = look(two, "pc2")
    finally:
        key.write_text(text)
    assert found["state"] == "not reached"
    assert re.search(r"Permission denied .*\nSee what this says: ssh -o BatchMode=yes pc2 true", found["reason"])
    assert look(two, "pc2")["state"] == "ready"
    assert_close(two.server.sample(two.prompt()(), timeout=120), expected)
    wait_for(lambda: two.ranks_there() == ranks, 10)


def test_another_version_there_is_named_with_the_remedy(two, expected):
    two.host.pack.unlink()
    shutil.copytree(ROOT / "cp_runtime", two.host.pack / "cp_runtime", ignore=shutil.ignore_patterns("__pycache__"))
    (two.host.pack / "cp_runtime" / "words.py").write_text("# older\n")
    try:
        found = look(two, "pc2")
        two.server.answer("/context_parallel/restart", "POST")
        error = two.server.fails(two.prompt()(), "the computer pc2 cannot work for this ComfyUI yet", timeout=60).exception_message
        assert re.search(r"this pack: [0-9a-f]{16} here, [0-9a-f]{16} there\. Update the older one: git pull", error)
        assert "torch" not in error.partition("cannot work")[2]
        assert found["state"] == "differs"
        assert found["reason"] in error
    finally:
        shutil.rmtree(two.host.pack)
        two.host.pack.symlink_to(ROOT, target_is_directory=True)
    assert_close(two.server.sample(two.prompt()(), timeout=120), expected)


def test_ranks_there_end_with_comfyui(two, expected):
    """Whatever ends it."""
    assert_close(two.server.sample(two.prompt()(), timeout=120), expected)
    before = two.ranks_there()
    assert before
    watch = Stopwatch("ssh, SIGKILL of ComfyUI")
    two.server.stop(signal.SIGKILL)
    assert psutil.wait_procs(before, 10)[1] == []
    watch.within(3, "nothing of it runs there any more")
    two.server.start()
    wait_for(lambda: two.server.status() is not None, 30)
    assert_close(two.server.sample(two.prompt()(), timeout=120), expected)
