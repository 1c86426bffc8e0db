"""Prompts that decode or encode with the VAE files of `support.vaes`."""

import itertools
from collections.abc import Mapping
from typing import Any

from .graphs import Graph, Prompt, cp_config

TILES = {"tile_size": 64, "overlap": 16, "temporal_size": 8, "temporal_overlap": 4}
LATENTS = {
    "full_flux": (16, 0, 8), "full_wan": (16, 3, 8), "wan": (16, 3, 8), "ltxv": (128, 3, 32), "ltxv_noise": (128, 3, 32),
    "kl": (4, 0, 8), "taesd": (4, 0, 8),
    "taehv": (16, 3, 8),
}  # fmt: skip
"""Channels and frames of the latent, and rows and columns of the picture for each of its, by file."""

_nonces = itertools.count(1)


def vae_prompt(
    name: str,
    method: str,
    mode: str | None = None,
    *,
    world: int = 2,
    batch: int = 1,
    rows: int = 13,
    columns: int = 10,
    tiles: Mapping[str, Any] = TILES,
    seed: int = 3,
    again: bool = False,
    **config: Any,
) -> Prompt:
    """A graph that decodes a random latent, or encodes a random picture, and saves the result.

    Args:
        mode: of the CP node; None = ComfyUI's own node, "tiled" = its tiled one.
        again: run although ComfyUI has the result of the same node: with another overlap, which mode exact does not look at.
    """
    tiles = {**tiles, "temporal_overlap": 4 * next(_nonces)} if again else tiles
    graph = Graph()
    channels, frames, ratio = LATENTS[name]
    vae = graph.add("vae", "VAELoader", vae_name=f"{name}_vae.safetensors")
    ours: dict[str, Any] = {"vae": vae}
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
