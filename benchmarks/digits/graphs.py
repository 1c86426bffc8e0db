"""Graphs that draw pages, in ComfyUI's API format."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.graphs import Graph, Prompt, cp_config

HERE = Path(__file__).resolve().parent
NODES = {"digits": HERE}
"""The node pack, as `ComfyServer` takes it."""
WEIGHTS = HERE / "digits.safetensors"


def put_weights(models: Path) -> None:
    """Copy the model into a folder of models."""
    folder = models / "diffusion_models"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(WEIGHTS, folder / WEIGHTS.name)


def pages(
    *texts: str,
    cp: Mapping[str, Any] | None = None,
    pipefusion: Mapping[str, Any] | None = None,
    steps: int = 20,
    cfg: float = 1.0,
    seed: int = 1,
    weight_dtype: str = "default",
) -> Prompt:
    """Draw a page for each text, and save latents and pictures.

    Args:
        cp: inputs of CP Config that differ from their defaults; None leaves context parallelism out.
        pipefusion: inputs of CP PipeFusion.
    """
    graph = Graph()
    model = graph.add("loader", "UNETLoader", unet_name=WEIGHTS.name, weight_dtype=weight_dtype)
    if cp is not None:
        config = graph.add("cp_config", "CPConfig", **{**cp_config(), **cp})
        if pipefusion is not None:
            config = graph.add("pipefusion", "CPPipeFusion", cp_config=config, **pipefusion)
        model = graph.add("cp_apply", "ApplyContextParallel", model=model, cp_config=config)
    positive = graph.add("positive", "DigitsPrompt", text="\n".join(texts))
    negative = graph.add("negative", "DigitsPrompt", text="")
    latent = graph.add("latent", "EmptySD3LatentImage", width=512, height=512, batch_size=len(texts))
    latent = graph.add(
        "sampler", "KSampler", model=model, positive=positive, negative=negative, latent_image=latent, seed=seed, steps=steps,
        cfg=cfg, sampler_name="euler", scheduler="simple", denoise=1.0,
    )  # fmt: skip
    graph.add("save", "SaveLatent", samples=latent, filename_prefix="digits")
    image = graph.add("decode", "DigitsDecode", samples=latent)
    graph.add("image", "SaveImage", images=image, filename_prefix="digits")
    return graph.prompt
