"""A real server with two fake devices (`support/stand_in`) of Intel, or of Ascend by the names that torch_npu gives."""

import pytest
from support import stand_in
from support.graphs import flux_prompt
from support.server import ComfyServer
from support.stand_in.memory import Ledger
from support.vae_graphs import vae_prompt

BOUND = 1e-5  # of float32, relative to the largest number


def assert_same(ours, stock):
    assert ((ours - stock).abs().max() / stock.abs().max()).item() <= BOUND


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "backend"), [("xpu", "xccl"), ("npu", "hccl")])
@pytest.mark.usefixtures("vae_files")
def test_two_devices_are_as_one(kind, backend, comfyui_path, checkpoints_dir, tmp_path, faults):
    cards = stand_in.Cards(count=2, gigabytes=8, ledger=tmp_path / "ledger", type=kind)
    options = {"args": stand_in.FLOAT32, "env": stand_in.environment(cards) | faults.environment}
    with ComfyServer(comfyui_path, models=checkpoints_dir, cpu=False, **options) as server:

        def right(expected, **settings):
            assert_same(server.sample(flux_prompt(cp=settings)), expected)
            return server.status()

        stock = server.sample(flux_prompt())
        status = right(stock, ring_degree=2, ulysses_degree=1)
        assert (status["backend"], [rank["device"] for rank in status["ranks"]]) == (backend, [f"{kind}:0", f"{kind}:1"])
        assert not status["fallback"]
        touched = Ledger(cards).contexts()
        assert [touched[rank["pid"]] for rank in status["ranks"]] == [[0], [1]]

        right(stock, weights="sharded")
        pids = server.worker_pids()
        prompts = vae_prompt("kl", "decode"), vae_prompt("kl", "decode", "exact", world=0, weights="sharded")
        assert_same(*map(server.sample, prompts))

        faults.arm(1, "slow", module=1, seconds=0.3)
        prompt = server.queue(flux_prompt(width=80, cp={"weights": "sharded"}))
        faults.wait_taken()
        server.wait_status(lambda status: status["ranks"][1]["modules"] > 2)  # on a slow machine one may take more than a second
        server.interrupt()
        assert server.wait(prompt, 30).status == "interrupted"
        right(stock, weights="sharded")
        assert server.worker_pids() == pids

        if kind == "npu":  # once is enough: a start takes a third of the test
            server.post("/context_parallel/restart")
            right(stock, weights="sharded")
            assert not {*server.worker_pids()} & {*pids}
