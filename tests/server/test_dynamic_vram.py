"""ComfyUI with DynamicVRAM, as it runs on NVIDIA GPUs by default, on two fake CUDA devices (`support/stand_in/dynamic_vram`).

Files are in half precision and the server computes in float32. DynamicVRAM leaves weights as they are in the file until they are used,
so every dtype that this pack reads off a model shows here.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import checkpoints, preloaded, stand_in
from support.checkpoints import SD3, Checkpoint, ClipL
from support.graphs import Graph, cp_config
from support.server import ComfyServer
from support.stand_in.memory import Ledger

BOUND = 1e-5  # of float32, relative to the standard deviation
MODEL = Checkpoint(architecture=SD3(context_dim=4096, pooled_dim=2048))
VAE = "sd3_kl_vae.safetensors"


@pytest.fixture(scope="module")
def models(comfyui_path, tmp_path_factory):
    """A model, a LoRA for it, a text encoder in its full size, and a VAE."""
    folder = tmp_path_factory.mktemp("dynamic")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(checkpoints.CHECKPOINTS, "model", MODEL)
        patched.setitem(checkpoints.LORAS, "lora", replace(checkpoints.LORAS["flux_lora"], base="model"))
        checkpoints.write("lora", folder)
    checkpoints.write("model", folder, dtype=torch.bfloat16, file_stem="model", checkpoint=MODEL)
    encoder = Checkpoint(architecture=ClipL(), folder="text_encoders")
    checkpoints.write("encoder", folder, dtype=torch.float16, file_stem="encoder", checkpoint=encoder)
    env = {**os.environ, "PYTHONPATH": str(comfyui_path)}
    made = preloaded.run(["-m", "support.vaes", str(folder), "sd3_kl"], cwd=Path(__file__).parents[1], env=env)
    assert made.returncode == 0, made.stderr
    vae = {name: weight.half() for name, weight in load_file(folder / "vae" / VAE).items()}
    save_file(vae, folder / "vae" / VAE)
    return folder


@pytest.fixture(scope="module")
def cards(models):
    return stand_in.Cards(count=2, gigabytes=8, ledger=models / "ledger", dynamic=True)


@pytest.fixture(scope="module")
def server(comfyui_path, models, cards):
    options = {"args": stand_in.FLOAT32, "env": stand_in.environment(cards)}
    with ComfyServer(comfyui_path, models=models, cpu=False, **options) as running:
        yield running


def picture(server, seed, cp=None, lora=0.0):
    """Latent, and picture, of a prompt: text encoder, model and VAE; on ranks with inputs of CP Config."""
    graph = Graph()
    model = graph.add("model", "UNETLoader", unet_name="model.safetensors", weight_dtype="default")
    vae = graph.add("vae", "VAELoader", vae_name=VAE)
    clip = graph.add("clip", "CLIPLoader", clip_name="encoder.safetensors", type="sd3", device="default")
    if lora:
        model = graph.add("lora", "LoraLoaderModelOnly", model=model, lora_name="lora.safetensors", strength_model=lora)
    decode = {"vae": vae}
    if cp is not None:
        config = graph.add("cp_config", "CPConfig", **cp_config(**cp))
        model = graph.add("cp_apply", "ApplyContextParallel", model=model, cp_config=config)
        tiles = {"tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}
        decode |= {"mode": "exact", "cp_config": config, **tiles}
    text = [graph.add(name, "CLIPTextEncode", clip=clip, text=name) for name in ("positive", "negative")]
    graph.add("latent", "EmptySD3LatentImage", width=64, height=64, batch_size=1)
    settings = {"sampler_name": "euler", "scheduler": "simple", "steps": 2, "cfg": 4.0, "seed": seed, "denoise": 1.0}
    out = graph.add("sampler", "KSampler", model=model, positive=text[0], negative=text[1], latent_image=["latent", 0], **settings)
    graph.add("save_latent", "SaveLatent", samples=out, filename_prefix="dynamic")
    image = graph.add("decode", "VAEDecode" if cp is None else "CPVAEDecode", samples=out, **decode)
    graph.add("save_picture", "SaveLatent", samples=graph.add("picture", "TestPicture", image=image), filename_prefix="dynamic")
    result = server.run(graph.prompt, timeout=180).check()
    return [server.latent(result, node).float() for node in ("save_latent", "save_picture")]


def difference(ours, stock):
    return max(((one - other).abs().max() / other.std()).item() for one, other in zip(ours, stock, strict=True))


def mapped(cards):
    """Bytes of each card that DynamicVRAM has."""
    ledger = Ledger(cards)
    return [ledger.mapped(card) for card in range(cards.count)]


def test_turns(server, cards):
    def show(name, *more):
        print("#####", name, mapped(cards), [Ledger(cards).tensors(c) for c in range(2)], *more)
    try:
        stock = picture(server, 1)
        show("stock")
        ours = picture(server, 1, cp={})
        show("ours", difference(ours, stock))
        lora = picture(server, 1, lora=1.0)
        show("lora", difference(lora, stock))
        lora2 = picture(server, 1, lora=1.0, cp={})
        show("lora ours", difference(lora2, lora))
        stock = picture(server, 2)
        show("stock again")
        ours = picture(server, 2, cp={})
        show("ours again", difference(ours, stock))
        server.free()
        time.sleep(5)
        show("free")
    finally:
        print(server.log_text())
    raise AssertionError
