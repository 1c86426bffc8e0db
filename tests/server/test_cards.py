"""A real server with two fake CUDA devices (`support/stand_in`), as a user has it who has two GPUs: NCCL by default.

float32 throughout, so that the latents are those of the stock graph on one card.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support import families, stand_in
from support.card_cases import VAES, cases
from support.faults import wait_for
from support.graphs import family_prompt, flux_prompt
from support.latents import assert_close, differ
from support.processes import descendants
from support.server import ComfyServer
from support.stand_in import groups, messages
from support.stand_in.memory import Ledger
from support.upscalers import upscale_prompt
from support.vae_graphs import vae_prompt

BOUND = 1e-5  # of float32, relative to the standard deviation
HALF_BOUND = 5e-2
FLUX_BYTES = 28.9e6
CASES = cases(2)
OFTEN = ("Flux, CFG, batch, odd size", "Wan, a patch", ("ltxv", "decode"))
"""What `make test` computes on cards: CPU ranks have every other graph."""


@pytest.fixture(scope="module")
def cards(tmp_path_factory):
    return stand_in.Cards(count=2, gigabytes=8, ledger=tmp_path_factory.mktemp("cards") / "ledger")


@pytest.fixture(scope="module")
def card_server(comfyui_path, checkpoints_dir, cards, faults):
    options = {"args": ["--fp32-unet", "--fp32-vae"], "env": stand_in.environment(cards) | faults.environment}
    with ComfyServer(comfyui_path, models=checkpoints_dir, cpu=False, **options) as running:
        yield running


def held(cards):
    """Bytes of tensors on each card."""
    ledger = Ledger(cards)
    return [ledger.tensors(card) for card in range(cards.count)]


def cached(cards, card=0):
    """Bytes of a card that processes keep of freed tensors."""
    return Ledger(cards).cached(card)


def latent(server, prompt, **options):
    return server.sample(prompt, **options).float()


def test_ranks_import_while_a_prompt_loads(card_server):
    """From the first prompt with a node of this pack on, in processes that are the ranks then."""

    def waiting():
        return [each.pid for each in descendants(card_server.pid) if each.name() == "cp-waiting"]

    latent(card_server, flux_prompt())
    latent(card_server, flux_prompt(cp={"world_size": 1}))
    report = {"report": {"class_type": "CPReport", "inputs": {"report": "{}"}}}
    card_server.run(flux_prompt() | report)
    assert waiting() == []
    whole = flux_prompt(cp={})
    loads = {name: whole[name] for name in ("cp_config", "loader", "cp_apply")}
    card_server.run(loads | {"shown": {"class_type": "PreviewAny", "inputs": {"source": ["cp_apply", 0]}}}).check()
    wait_for(lambda: len(waiting()) == 2, 10)
    early = waiting()
    assert card_server.status()["ranks"] == []
    latent(card_server, flux_prompt(cp=CASES["Flux"][1]))
    assert {rank["pid"] for rank in card_server.status()["ranks"]} == {*early}
    latent(card_server, flux_prompt(cp=CASES["Flux"][1]))
    assert waiting() == []


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.soak) for name in CASES])
def test_two_cards_are_as_one(card_server, case):
    graph, cp = CASES[case]
    stock, ours = latent(card_server, graph()), latent(card_server, graph(cp=cp))
    assert_close(ours, stock, BOUND)
    status = card_server.status()
    assert (status["backend"], [rank["device"] for rank in status["ranks"]]) == ("nccl", ["cuda:0", "cuda:1"])


@pytest.mark.parametrize(("name", "method"), [pytest.param(*vae, marks=() if vae in OFTEN else pytest.mark.soak) for vae in VAES])
@pytest.mark.usefixtures("vae_files")
def test_a_picture_is_decoded_on_both_cards(card_server, name, method):
    prompts = vae_prompt(name, method), vae_prompt(name, method, "exact", world=0)
    stock, ours = (latent(card_server, prompt) for prompt in prompts)
    assert ((ours - stock).abs().max() / stock.abs().max()).item() <= BOUND


@pytest.mark.soak  # CPU ranks upscale in every way
@pytest.mark.usefixtures("upscalers")
def test_a_picture_is_upscaled_on_both_cards(card_server, cards):
    """The stock node between two runs on the ranks takes its memory of the first card, and gives it back."""
    size = {"width": 700, "height": 60}
    stock = latent(card_server, upscale_prompt("dat", **size))
    for seed in (3, 4, 3):
        assert_close(latent(card_server, upscale_prompt("dat", 0, **size, again=True)), stock, BOUND)
        latent(card_server, upscale_prompt("dat", **size | {"seed": seed + 10}))
    assert card_server.status()["last_upscale_call"]["degrees"] == {"tiles": 2}


SERVED = {name: entry for name, (_, entry, _) in families.served().items()}
TEXTS = {
    "minimax": ({}, "token_refiner"),
    "anima": ({"t5xxl_ids": torch.arange(3, 10), "t5xxl_weights": torch.linspace(0.5, 1.5, 7)}, "llm_adapter"),
}
"""Conditions whose texts ComfyUI sends through a part of the transformer before sampling, in its own process; and that part."""


def write_lora(models, served, part):
    """A LoRA for the matrices of that part; returns its name."""
    found, name = {}, f"{served}_texts"
    with safe_open(models / "diffusion_models" / families.checkpoint_of(SERVED[served]), "pt") as file:
        for key in file.keys():  # noqa: SIM118  (it is no mapping)
            if part in key and key.endswith(".weight") and len(shape := file.get_slice(key).get_shape()) == 2:
                generator = torch.Generator().manual_seed(len(found))
                path = f"diffusion_model.{key.removeprefix('model.diffusion_model.').removesuffix('.weight')}"
                found[f"{path}.lora_up.weight"] = torch.randn(shape[0], 2, generator=generator)
                found[f"{path}.lora_down.weight"] = torch.randn(2, shape[1], generator=generator)
    assert found
    (models / "loras").mkdir(exist_ok=True)
    save_file(found, models / "loras" / f"{name}.safetensors")
    return name


@pytest.mark.parametrize("served", TEXTS)
def test_texts_are_prepared_with_patched_weights_on_the_card(served, card_server, family_checkpoints, checkpoints_dir):
    conditions, part = TEXTS[served]
    entry = replace(SERVED[served], cond={**SERVED[served].cond, **conditions})
    lora = write_lora(checkpoints_dir, served, part)

    def first(**settings):
        return next(iter(card_server.latents(card_server.run(family_prompt(entry, **settings))).values()))

    plain, stock, ours = first(), first(loras=[lora]), first(loras=[lora], cp={})
    assert differ(stock, plain)
    assert_close(ours, stock, BOUND)


@pytest.mark.soak
def test_two_cards_in_half_precision_are_as_one(comfyui_path, checkpoints_dir, cards, tmp_path):
    """A server without any option: weights and numbers are of the type that ComfyUI takes on these cards."""
    machine = replace(cards, ledger=tmp_path / "ledger")
    with ComfyServer(comfyui_path, models=checkpoints_dir, cpu=False, env=stand_in.environment(machine)) as server:
        stock, ours = latent(server, flux_prompt()), latent(server, flux_prompt(cp={}), timeout=180)
        assert stock.isfinite().all()
        assert_close(ours, stock, HALF_BOUND)
        status = server.status()
        touched = Ledger(machine).contexts()
        assert [touched[rank["pid"]] for rank in status["ranks"]] == [[0], [1]]  # none has a context on another's card


def test_every_card_holds_the_model_once_and_gives_it_back(card_server, cards):
    """ComfyUI's own copy leaves the card that rank 0 shares with it. Ranks have launched the same messages in one order."""
    latent(card_server, flux_prompt(seed=2))
    latent(card_server, flux_prompt(seed=2, cp={}))
    logs = [messages.logged(cards.ledger, rank["pid"]) for rank in card_server.status()["ranks"]]
    assert logs[0]
    assert not messages.disagreement(logs)
    assert all(0.9 < taken / FLUX_BYTES < 1.5 for taken in held(cards)), held(cards)
    card_server.free_workers()
    wait_for(lambda: held(cards)[1] <= 1e6, 5)


def test_the_next_pool_remembers_a_lack_of_memory(card_server, faults):
    """Rank 0 waits for rank 1, so both are killed. The retry and later prompts take less, until the user restarts the workers."""
    stock = latent(card_server, flux_prompt(seed=3))

    def placement():
        ours = latent(card_server, flux_prompt(seed=3, cp={}))
        assert_close(ours, stock, BOUND)
        return card_server.status()["weights"]["flux.safetensors"].partition(":")[0]

    assert placement() == "whole"
    before = card_server.worker_pids()
    faults.arm(1, "oom", module=2)
    assert placement() == "offloaded"  # with few large blocks, sharded ones take no less than whole ones
    assert not faults.waiting
    assert not set(before) & set(card_server.worker_pids())
    assert placement() == "offloaded"
    card_server.post("/context_parallel/restart")
    assert placement() == "whole"


def make_room(server, graph):
    """Have ComfyUI free 1 MB more of its card than is free, with the nodes of a graph, which has run, in its cache."""
    server.run({**graph, "room": {"class_type": "TestRoom", "inputs": {"more": 1.0}}}).check()


def test_idle_models_are_unloaded_only_for_room(card_server, cards):
    """On the second card, where ComfyUI itself would not look: it loads the sampled model onto the first one."""
    card_server.free_workers()
    placements = []
    for gigabytes, loaded in ((2.0, {}), (7.2, {"loras": ["flux_lora"]})):
        idle = {"idle": {"class_type": "TestIdleModel", "inputs": {"gigabytes": gigabytes, "device": "cuda:1"}}}
        card_server.run(idle).check()
        assert held(cards)[1] >= gigabytes * 1e9
        latent(card_server, flux_prompt(seed=6, cp={}, **loaded))
        placements.append(card_server.status()["weights"]["flux.safetensors"].partition(":")[0])
        assert (held(cards)[1] >= gigabytes * 1e9) == (gigabytes == 2.0), held(cards)
    assert placements == ["whole", "whole"]


OTHER_PROGRAM = """
import sys, time
sys.path[:0] = {path}
from support.stand_in import Cards
from support.stand_in.memory import CONTEXT, Ledger
from pathlib import Path
ledger = Ledger(Cards(count=2, gigabytes=8, ledger=Path({file!r})))
ledger.map(1, ledger.free(1) - CONTEXT - {left})
print("taken", flush=True)
time.sleep(600)
"""


def test_a_full_card_is_left_out(card_server, cards):
    """Another program has the second card. The model is whole on the first one, and the sampler gets what one card computes."""
    card_server.free_workers()
    expected = latent(card_server, flux_prompt(ckpt="flux_deep", seed=6))
    latent(card_server, flux_prompt(seed=6, cp={}))
    program = OTHER_PROGRAM.format(path=sys.path, file=str(cards.ledger), left=4 << 20)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "taken\n"
            result = card_server.run(flux_prompt(ckpt="flux_deep", seed=6, cp={"ranks_per_call": "auto"}, node="CPSampler")).check()
            status = card_server.status()
        finally:
            other.kill()
    assert_close(card_server.latent(result).float(), expected, BOUND)
    assert status["weights"]["flux_deep.safetensors"].startswith("whole: 0.0")
    assert " on the first 1 of 2 devices; the others have 0 GB free" in status["weights"]["flux_deep.safetensors"]
    assert status["memory"]["flux_deep.safetensors"]["case"] == "some"
    assert [rank["idle"] for rank in status["ranks"]] == [False, True]


def loads(server):
    """How often ranks have loaded a model."""
    return server.log_text().count(" is on 2 ranks after ")


def test_two_sharded_models_stay_loaded(card_server):
    """As with the two models of Wan 2.2: both are loaded once."""
    two = {"ckpt": "flux", "low_ckpt": "flux_deep", "node": "KSamplerAdvanced", "cp": {"weights": "sharded"}}
    card_server.free_workers()
    before = loads(card_server)
    for seed in (7, 8):
        latent(card_server, flux_prompt(seed=seed, **two))
    assert loads(card_server) == before + 2


@pytest.mark.parametrize("weights", [pytest.param("whole", marks=pytest.mark.soak), "sharded"])
def test_a_text_encoder_takes_only_the_room_it_needs(card_server, cards, weights):
    """First what rank 0 keeps of freed memory, and for blocks on their way; then the model, of this card alone where every card has
    all of it."""
    graph = flux_prompt(seed=3, width=256, height=256, cp={"weights": weights})
    expected = latent(card_server, flux_prompt(seed=3, width=256, height=256))
    latent(card_server, graph)
    loaded, size = loads(card_server), FLUX_BYTES * (1 if weights == "whole" else 0.5)
    kept, of_torch = held(cards), cached(cards)
    assert of_torch > 2e6

    make_room(card_server, graph)
    assert cached(cards) < of_torch - 1e6
    assert 0.9 * size < held(cards)[0] < 1.2 * size
    assert held(cards)[1] == kept[1]

    make_room(card_server, graph)
    assert held(cards)[0] < 0.3 * size, held(cards)
    assert (held(cards)[1] > 0.9 * size) == (weights == "whole"), held(cards)

    again = latent(card_server, flux_prompt(seed=4, width=256, height=256, cp={"weights": weights}))
    assert not torch.equal(again, expected)
    assert all(taken > 0.9 * size for taken in held(cards)), held(cards)
    assert_close(latent(card_server, graph), expected, BOUND)
    assert loads(card_server) == loaded


@pytest.mark.soak
def test_cards_that_share_memory_are_as_one(comfyui_path, checkpoints_dir, tmp_path):
    """In place of NCCL through the host's memory, with groups of some of the ranks."""
    cards = stand_in.Cards(count=4, gigabytes=8, ledger=tmp_path / "ledger")
    options = {"args": ["--fp32-unet", "--fp32-vae"], "env": stand_in.environment(cards) | {stand_in.LINK: groups.LATE}}
    with ComfyServer(comfyui_path, models=checkpoints_dir, cpu=False, **options) as server:
        stock = latent(server, flux_prompt(cfg=4.0))
        cp = {"batch_degree": 1, "ring_degree": 2, "ulysses_degree": 2}
        assert_close(latent(server, flux_prompt(cfg=4.0, cp=cp)), stock, BOUND)
        status = server.status()
        assert (status["backend"], status["peer_to_peer"]) == ("gloo", False)
        assert status["fallback"].startswith("exchanges through shared memory are ")
