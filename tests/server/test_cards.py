"""A real server with two cards that are not there (`support/stand_in`), as a user has it who has two GPUs: NCCL by default.

float32 throughout, so that the latents are those of the stock graph on one card.
"""

from __future__ import annotations

import pytest
from support import stand_in
from support.graphs import flux_prompt, wan_prompt
from support.server import ComfyServer
from support.stand_in.memory import Ledger
from support.vae_graphs import vae_prompt

BOUND = 1e-5  # of float32, relative to the standard deviation
FLUX_BYTES = 28.9e6
CASES = {
    "Flux": (flux_prompt, {}, {}),
    "Flux, ring": (flux_prompt, {}, {"ring_degree": 2, "ulysses_degree": 1}),
    "Flux, CFG, batch, odd size": (flux_prompt, {"cfg": 4.0, "batch": 2, "width": 72, "height": 104, "tokens": 13}, {}),
    "Flux, mask": (flux_prompt, {"attention_mask": "bias"}, {}),
    "Flux, ControlNet": (flux_prompt, {"control": {}, "cfg": 4.0}, {}),
    "Flux, LoRA": (flux_prompt, {"loras": ["flux_lora"]}, {}),
    "Flux, LoRA changed": (flux_prompt, {"loras": [("flux_lora", 0.5)]}, {}),
    "Flux, sharded weights": (flux_prompt, {}, {"weights": "sharded"}),
    "Flux, offloaded weights": (flux_prompt, {"loras": ["flux_lora"]}, {"weights": "offloaded"}),
    "Wan": (wan_prompt, {"cfg": 4.0}, {}),
    "Wan, sequence only": (wan_prompt, {"cfg": 4.0}, {"batch_degree": 1}),
}


@pytest.fixture(scope="module")
def cards(tmp_path_factory):
    return stand_in.Cards(count=2, gigabytes=8, ledger=tmp_path_factory.mktemp("cards") / "ledger")


@pytest.fixture(scope="module")
def card_server(comfyui_path, checkpoints_dir, cards):
    options = {"args": ["--fp32-unet", "--fp32-vae"], "env": stand_in.environment(cards)}
    with ComfyServer(comfyui_path, models=checkpoints_dir, cpu=False, **options) as running:
        yield running


def held(cards):
    """Bytes of each card that are taken."""
    ledger = Ledger(cards)
    return [ledger.capacity - ledger.free(card) for card in range(cards.count)]


def latent(server, prompt):
    return server.latent(server.run(prompt).check()).float()


@pytest.mark.parametrize("case", CASES)
def test_two_cards_are_as_one(card_server, case):
    graph, settings, cp = CASES[case]
    stock, ours = latent(card_server, graph(**settings)), latent(card_server, graph(cp=cp, **settings))
    assert ours.shape == stock.shape
    assert ((ours - stock).abs().max() / stock.std()).item() <= BOUND
    status = card_server.get("/context_parallel/status")
    assert (status["backend"], [rank["device"] for rank in status["ranks"]]) == ("nccl", ["cuda:0", "cuda:1"])


def test_a_picture_is_decoded_on_both_cards(card_server, vae_files):
    prompts = vae_prompt("wan", "decode"), vae_prompt("wan", "decode", "auto", world=0)
    stock, ours = (latent(card_server, prompt) for prompt in prompts)
    assert ((ours - stock).abs().max() / stock.abs().max()).item() <= BOUND


def test_every_card_holds_the_model_once_and_gives_it_back(card_server, cards):
    """ComfyUI's own copy leaves the card that rank 0 shares with it."""
    latent(card_server, flux_prompt(seed=2))
    latent(card_server, flux_prompt(seed=2, cp={}))
    assert all(0.9 < taken / FLUX_BYTES < 1.5 for taken in held(cards)), held(cards)
    card_server.free_workers()
    assert held(cards)[1] < 1e6
