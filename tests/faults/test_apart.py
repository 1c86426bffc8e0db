"""Case 45: ranks that cannot map ComfyUI's memory, as in a container that hides other processes, get all through pipes."""

import os

import psutil
import pytest
import torch
from faults.owner import Owner
from support.graphs import flux_prompt
from support.latents import assert_close
from support.pools import echo, small_pool

LARGE = torch.arange(6 << 20, dtype=torch.int32)  # 24 MB


@pytest.mark.parametrize("apart", [(0,), (1,), (0, 1)], ids=str)
def test_tensors_come_and_go_through_pipes(start_faults, apart):
    for rank in apart:
        start_faults.arm(rank, "sees no memory", at="memory")
    with small_pool() as pool:
        assert pool.apart == {*apart}
        for value in (LARGE, torch.ones(3), torch.empty(0), -LARGE):
            assert torch.equal(echo(pool, value), value)
        listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {c.laddr.ip for c in listening} == {"127.0.0.1"}  # of the store in which they meet
        assert len(listening) == 1
    assert not [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]


SSH = """#!/bin/sh
# To this computer itself.
[ "$1" = -G ] && exec printf 'hostname 127.0.0.1\\nport 22\\n'
for command; do :; done
export SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"
exec sh -c "$command"
"""


@pytest.mark.parametrize("apart", [False, True], ids=["memory shared there", "none shared"])
def test_bytes_are_handed_on_to_the_other_ranks_of_a_host(apart, tmp_path, monkeypatch, start_faults):
    if apart:
        start_faults.arm(3, "sees no memory", at="memory")
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with small_pool(4, devices="cpu,cpu,pc/cpu,pc/cpu") as pool:
        assert pool.apart == {2, 3}
        assert pool._piped == ({2, 3} if apart else {2})
        sent = {rank: [] for rank in (2, 3)}
        for rank, frames in sent.items():
            send = pool.processes[rank].send
            monkeypatch.setattr(
                pool.processes[rank], "send", lambda frame, send=send, frames=frames: (frames.append(len(frame.body)), send(frame))
            )
        for value in (LARGE, torch.ones(3), torch.empty(0), -LARGE):
            assert torch.equal(echo(pool, value), value)
        assert sum(sent[2]) >= 2 * LARGE.nbytes
        assert sum(sent[3]) == (sum(sent[2]) if apart else 0)


def test_prompts_with_patches_and_two_ranks_apart(fault_server, faults):
    """Weight patches and conditioning go through pipes, what ranks send each other through gloo; a restart begins anew."""
    lora = {"cfg": 3.0, "loras": [("flux_lora", 0.8)]}
    stock, prompt = fault_server.sample(flux_prompt(**lora)), flux_prompt(**lora, cp={"world_size": 2})
    for rank in range(2):
        faults.arm(rank, "sees no memory", at="memory")
    fault_server.post("/context_parallel/restart")
    assert_close(fault_server.sample(prompt), stock)
    assert "tensors go through pipes" in fault_server.log_text()
    assert faults.waiting == []
    assert fault_server.post("/context_parallel/restart")["restarted"]
    assert_close(fault_server.sample(prompt), stock)


def test_the_end_of_such_a_pool_leaves_nothing(temp, faults):
    faults.arm(1, "sees no memory", at="memory")
    with Owner(temp, faults.pool_environment) as owner:
        pids = owner.ask("start", pool="a")["pids"]
        assert owner.ask("echo", pool="a", nbytes=1 << 20)["same"]
        os.kill(pids[1], 9)
        with pytest.raises(Exception, match="SIGKILL"):
            owner.ask("echo", pool="a")
        assert not [c for c in psutil.Process(owner.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
