"""Case 45: ranks that cannot map ComfyUI's memory, as in a container that hides other processes, get all through pipes."""

import os

import psutil
import pytest
import torch
from faults.owner import Owner
from support.graphs import flux_prompt
from support.latents import assert_close
from support.pools import echo, small_pool
from support.server import ComfyServer

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


def test_prompts_with_patches_and_two_ranks_apart(comfyui_path, checkpoints_dir, faults):
    """Weight patches and conditioning go through pipes, what ranks send each other through gloo; a restart begins anew."""
    lora = {"cfg": 3.0, "loras": [("flux_lora", 0.8)]}
    for rank in range(2):
        faults.arm(rank, "sees no memory", at="memory")
    with ComfyServer(comfyui_path, models=checkpoints_dir, env=faults.environment) as server:
        stock = server.sample(flux_prompt(**lora))
        assert_close(server.sample(flux_prompt(**lora, cp={"world_size": 2})), stock)
        assert "tensors go through pipes" in server.log_text()
        assert faults.waiting == []
        assert server.post("/context_parallel/restart")["restarted"]
        assert_close(server.sample(flux_prompt(**lora, cp={"world_size": 2})), stock)


def test_the_end_of_such_a_pool_leaves_nothing(temp, faults):
    faults.arm(1, "sees no memory", at="memory")
    with Owner(temp, faults.pool_environment) as owner:
        pids = owner.ask("start", pool="a")["pids"]
        assert owner.ask("echo", pool="a", nbytes=1 << 20)["same"]
        os.kill(pids[1], 9)
        with pytest.raises(Exception, match="SIGKILL"):
            owner.ask("echo", pool="a")
        assert not [c for c in psutil.Process(owner.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
