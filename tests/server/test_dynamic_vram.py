"""ComfyUI with DynamicVRAM, as it runs on NVIDIA GPUs by default, on two fake CUDA devices (`support/stand_in/dynamic_vram`).

Files are in half precision and the server computes in float32. DynamicVRAM leaves weights as they are in the file until they are
used, so every dtype that this pack reads off a model shows here.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support import checkpoints, families, preloaded, stand_in
from support.architectures import SD3, ClipL
from support.checkpoints import Checkpoint
from support.faults import wait_for
from support.gguf_files import write
from support.graphs import Graph, cp_config, family_prompt, flux_prompt
from support.latents import distance
from support.server import CUSTOM_NODES, GGUF_NODES, ComfyServer
from support.stand_in.memory import Ledger
from support.upscalers import upscale_prompt
from support.vae_graphs import vae_prompt

BOUND = 5e-5  # of float32, relative to the standard deviation
LORA_BOUND = 5e-3  # without DynamicVRAM ComfyUI adds a LoRA in half precision
WIDER_BOUND = 1e-2  # of one on the input layer, through which the latent comes: 4.9e-3, or 5.4e-3 after other models
HALF_BOUND = 5e-2  # of calls that ComfyUI computes in half precision, as it does with fp8 weights
MODEL = Checkpoint(architecture=SD3(context_dim=4096, pooled_dim=2048))
TESTS = Path(__file__).parents[1]
SERVED = {name: entry for name, (_, entry, _) in families.served().items()}
VAE = "sd3_kl_vae.safetensors"


@pytest.fixture(scope="module")
def models(comfyui_path, tmp_path_factory):
    """A model, a LoRA for it, a text encoder in its full size, and a VAE."""
    folder = tmp_path_factory.mktemp("dynamic")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(checkpoints.CHECKPOINTS, "model", MODEL)
        patched.setitem(checkpoints.LORAS, "lora", replace(checkpoints.LORAS["flux_lora"], base="model"))
        checkpoints.write("lora", folder)
    checkpoints.write("flux", folder, dtype=torch.bfloat16)
    checkpoints.write("flux_lora", folder)
    shapes = {"lora_A.weight": (4, 128), "lora_B.weight": (256, 4)}
    wider = {f"diffusion_model.img_in.{name}": 0.2 * torch.randn(shape) for name, shape in shapes.items()}
    save_file({**wider, "diffusion_model.img_in.reshape_weight": torch.tensor([256, 128])}, folder / "loras" / "wider.safetensors")
    write(folder / "diffusion_models" / "flux-bfloat16.safetensors", folder / "diffusion_models" / "flux.gguf")
    checkpoints.write("model", folder, dtype=torch.bfloat16, file_stem="model", checkpoint=MODEL)
    encoder = Checkpoint(architecture=ClipL(), folder="text_encoders")
    checkpoints.write("encoder", folder, dtype=torch.float16, file_stem="encoder", checkpoint=encoder)
    preloaded.write_models("support.vaes", folder, "sd3_kl", "wan")
    preloaded.write_models("support.models", folder / "diffusion_models", "anima")
    preloaded.write_models("support.upscalers", folder, "compact")
    for file in (*(folder / "vae").iterdir(), folder / "diffusion_models" / families.checkpoint_of(SERVED["anima"])):
        half(file)
    return folder


def half(file):
    """Have a file in half precision."""
    with safe_open(file, "pt") as opened:
        tensors, metadata = {name: opened.get_tensor(name).half() for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    save_file(tensors, file, metadata)


@pytest.fixture(scope="module")
def cards(models):
    return stand_in.Cards(count=2, gigabytes=8, ledger=models / "ledger", dynamic=True)


@pytest.fixture(scope="module")
def ledger(cards):
    return Ledger(cards)


@pytest.fixture(scope="module")
def server(comfyui_path, models, cards):
    options = {"args": ["--fp32-unet", "--fp32-vae", "--fp32-text-enc"], "env": stand_in.environment(cards)}
    with ComfyServer(comfyui_path, models=models, cpu=False, custom_nodes=CUSTOM_NODES | GGUF_NODES, **options) as running:
        yield running


def graph_of_text():
    """A text encoder and its texts."""
    graph = Graph()
    clip = graph.add("clip", "CLIPLoader", clip_name="encoder.safetensors", type="sd3", device="default")
    for name in ("positive", "negative"):
        graph.add(name, "CLIPTextEncode", clip=clip, text=name)
        graph.add(f"show_{name}", "PreviewAny", source=[name, 0])
    return graph


def picture(server, seed, cp=None, lora=0.0):
    """Latent, and picture, of a prompt: text encoder, model and VAE; on ranks with inputs of CP Config."""
    graph = graph_of_text()
    model = graph.add("model", "UNETLoader", unet_name="model.safetensors", weight_dtype="default")
    vae = graph.add("vae", "VAELoader", vae_name=VAE)
    if lora:
        model = graph.add("lora", "LoraLoaderModelOnly", model=model, lora_name="lora.safetensors", strength_model=lora)
    decode = {"vae": vae}
    if cp is not None:
        config = graph.add("cp_config", "CPConfig", **cp_config(**cp))
        model = graph.add("cp_apply", "ApplyContextParallel", model=model, cp_config=config)
        tiles = {"tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}
        decode |= {"mode": "exact", "cp_config": config, **tiles}
    text = {name: [name, 0] for name in ("positive", "negative")}
    graph.add("latent", "EmptySD3LatentImage", width=64, height=64, batch_size=1)
    settings = {"sampler_name": "euler", "scheduler": "simple", "steps": 2, "cfg": 4.0, "seed": seed, "denoise": 1.0}
    out = graph.add("sampler", "KSampler", model=model, latent_image=["latent", 0], **text, **settings)
    graph.add("save_latent", "SaveLatent", samples=out, filename_prefix="dynamic")
    image = graph.add("decode", "VAEDecode" if cp is None else "CPVAEDecode", samples=out, **decode)
    graph.add("save_picture", "SaveLatent", samples=graph.add("picture", "TestPicture", image=image), filename_prefix="dynamic")
    result = server.run(graph.prompt, timeout=180).check()
    return [server.latent(result, node).float() for node in ("save_latent", "save_picture")]


def difference(ours, stock):
    return max(map(distance, ours, stock))


def test_two_cards_are_as_one_with_dynamic_vram(server, ledger):
    """A stock prompt, the same on the ranks, and so on, with a LoRA and without. Text encoder, model and VAE are ComfyUI's dynamic
    ones. The ranks find nothing left of model and VAE on the device that they share with ComfyUI's process."""
    encoder = graph_of_text()
    server.run(encoder.prompt, timeout=120).check()
    of_encoder, plain = ledger.mapped(0), None
    for seed, lora in ((1, 0.0), (1, 1.0), (2, 0.0)):
        stock = picture(server, seed, lora=lora)
        assert ledger.mapped(0) > of_encoder > 0
        assert plain is None or difference(stock, plain) > 0.1
        ours, plain = picture(server, seed, cp={}, lora=lora), stock
        assert difference(ours, stock) <= BOUND
        assert (ledger.mapped(0), ledger.mapped(1)) == (of_encoder, 0)
    log = server.log_text()
    assert "DynamicVRAM support detected and enabled" in log
    assert all(f"Model {name} prepared for dynamic VRAM loading" in log for name in ("SD3", "SD3ClipModel_", "AutoencoderKL"))
    assert "whole: 0.0075 GB of weights" in log  # as they are on the devices, and not in the file
    server.free_workers()
    wait_for(lambda: not any(count(card) for count in (ledger.mapped, ledger.tensors) for card in range(2)), 5)


def test_weights_that_are_rounded_to_8_bits(server):
    """Small modules stay in half precision. One device computes first with patched weights as they are before they are rounded, and
    then with the rounded ones, as the ranks do."""
    prompt = partial(flux_prompt, ckpt="flux-bfloat16", weight_dtype="fp8_e4m3fn", loras=["flux_lora"])

    def latent(seed, **settings):
        return [server.latent(server.run(prompt(seed=seed, **settings), timeout=120).check()).float()]

    latent(1)
    stock = latent(2)
    assert difference(latent(2, cp={}), stock) <= HALF_BOUND


def test_a_lora_that_makes_the_input_layer_wider(server):
    """ComfyUI's process has that layer patched, until one that pages loads the model."""

    def latent(lora, **settings):
        loras = [("wider", lora)] if lora else []
        return [server.sample(flux_prompt(ckpt="flux-bfloat16", loras=loras, **settings), timeout=120).float()]

    plain = latent(0.0)
    for weights in ("whole", "sharded"):
        assert difference(latent(1.0, cp={"weights": weights}), latent(1.0)) <= WIDER_BOUND
        assert difference(latent(0.0, cp={"weights": weights}), plain) <= BOUND
    assert difference(latent(1.0), plain) > 0.1
    assert difference(latent(0.0), plain) <= BOUND


def test_a_model_whose_loader_does_without_dynamic_vram(server):
    """ComfyUI makes a dynamic model, of which the loader of a GGUF file makes one that is not."""

    def latent(lora, **cp):
        prompt = flux_prompt(loras=[("flux_lora", lora)] if lora else [], steps=1, cp=cp or None)
        prompt["loader"] = {"class_type": "UnetLoaderGGUF", "inputs": {"unet_name": "flux.gguf"}}
        return [server.sample(prompt, timeout=120).float()]

    for lora, weights in ((0.0, "whole"), (1.0, "sharded")):
        assert difference(latent(lora, weights=weights), latent(lora)) <= BOUND


def test_a_vae_whose_file_has_another_dtype_is_decoded_on_both_cards(server):
    prompts = vae_prompt("wan", "decode"), vae_prompt("wan", "decode", "exact", world=0)
    stock, ours = (server.sample(prompt).float() for prompt in prompts)
    assert ((ours - stock).abs().max() / stock.abs().max()).item() <= BOUND


def test_a_picture_is_upscaled_on_both_cards(server, ledger):
    """By ComfyUI's node and ours in turn: each finds the weights where the other has left them."""
    size = {"width": 700, "height": 60}
    stock = server.sample(upscale_prompt("compact", **size))
    for seed in (5, 6):
        ours = server.sample(upscale_prompt("compact", 0, **size, again=True))
        assert distance(ours, stock) <= BOUND
        server.sample(upscale_prompt("compact", **size, seed=seed))


def test_one_device_computes_what_the_ranks_cannot(server):
    """As without context parallelism, whatever DynamicVRAM has left on the device before."""
    prompt = partial(flux_prompt, ckpt="flux-bfloat16", control={"reads_weights": True})

    def latent(strength, **settings):
        return [server.sample(prompt(loras=[("flux_lora", strength)], **settings), timeout=120).float()]

    alone = {"on_unsupported": "single device"}
    fresh = latent(0.5, cp=alone)
    first, stock = latent(1.0), latent(0.5)
    latent(1.0)
    ours = latent(0.5, cp=alone)
    assert difference(first, stock) > 0.1
    assert difference(ours, stock) <= LORA_BOUND
    assert difference(fresh, stock) <= LORA_BOUND
    assert difference(latent(1.0), first) <= LORA_BOUND


def test_texts_are_prepared_with_weights_of_the_models_dtype(server):
    entry = SERVED["anima"]
    conditions = {"t5xxl_ids": torch.arange(3, 10), "t5xxl_weights": torch.linspace(0.5, 1.5, 7)}
    entry = replace(entry, cond={**entry.cond, **conditions})
    ours, stock = ([server.sample(family_prompt(entry, cp=cp))] for cp in ({}, None))
    assert difference(ours, stock) <= BOUND
