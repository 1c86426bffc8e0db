"""CP VAE Decode and CP VAE Encode on a real server, against ComfyUI's own nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import preloaded
from support.graphs import Graph, cp_config
from support.worlds import on_ranks

BOUND = 1e-5  # relative, float32
TESTS = Path(__file__).resolve().parents[1]
TILES = {"tile_size": 64, "overlap": 16, "temporal_size": 8, "temporal_overlap": 4}
# Channels and frames of the latent, rows and columns for each of its.
LATENTS = {"wan": (16, 3, 8), "ltxv": (128, 3, 32), "kl": (4, 0, 8), "taesd": (4, 0, 8), "taehv": (16, 3, 8)}
EXACT = ("wan", "ltxv", "kl")


@pytest.fixture(scope="session")
def vae_files(comfyui_path: Path, checkpoints_dir: Path) -> None:
    done = preloaded.run(
        ["-m", "support.vaes", str(checkpoints_dir)], cwd=TESTS, env={**os.environ, "PYTHONPATH": str(comfyui_path)}
    )
    assert done.returncode == 0, done.stderr


def vae_prompt(name, method, mode=None, *, world=2, batch=1, rows=13, columns=10, tiles=TILES, seed=3, **config):
    """A graph that decodes a random latent, or encodes a random picture, and saves the result.

    Args:
        mode: of the CP node; None = ComfyUI's own node, "tiled" = its tiled one.
    """
    graph = Graph()
    channels, frames, ratio = LATENTS[name]
    vae = graph.add("vae", "VAELoader", vae_name=f"tiny_{name}.safetensors")
    ours = {"vae": vae}
    if mode == "tiled":
        ours |= tiles
    elif mode is not None:
        ours |= {"mode": mode, "cp_config": graph.add("cp_config", "CPConfig", **cp_config(world_size=world, **config)), **tiles}
    kind = {None: "VAE{}", "tiled": "VAE{}Tiled"}.get(mode, "CPVAE{}").format(method.capitalize())
    if method == "decode":
        latent = graph.add(
            "latent", "TestLatent", batch=batch, channels=channels, frames=frames, height=rows, width=columns, seed=seed, noise=1.0
        )
        picture = graph.add("run", kind, samples=latent, **ours)
        graph.add("save", "SaveLatent", samples=graph.add("picture", "TestPicture", image=picture), filename_prefix="vae")
    else:
        count = 9 if frames else batch
        picture = graph.add("picture", "TestImage", seed=seed, width=columns * ratio + 3, height=rows * ratio, frames=count)
        graph.add("save", "SaveLatent", samples=graph.add("run", kind, pixels=picture, **ours), filename_prefix="vae")
    return graph.prompt


def run(server, *args, **kwargs):
    return server.latent(server.run(vae_prompt(*args, **kwargs)).check())


def difference(ours, stock):
    assert ours.shape == stock.shape
    return float((ours - stock).abs().max() / stock.abs().max())


METHODS = [(name, method) for name in LATENTS for method in ("decode", "encode") if (name, method) != ("kl", "encode")]


@pytest.mark.usefixtures("vae_files")
class TestVAE:
    @pytest.mark.parametrize(("name", "method", "world"), [on_ranks(2 + i % 3, *m) for i, m in enumerate(METHODS) if m[0] in EXACT])
    def test_exact_is_the_stock_result(self, server, name, method, world):
        stock = run(server, name, method)
        assert difference(run(server, name, method, "auto", world=world), stock) <= BOUND

    @pytest.mark.parametrize(("name", "method", "world"), [on_ranks(4 - i % 3, *m) for i, m in enumerate(METHODS)])
    def test_tiles_are_bit_equal_to_the_stock_tiled_node(self, server, name, method, world):
        stock = run(server, name, method, "tiled")
        assert (run(server, name, method, "tiles", world=world) == stock).all()
