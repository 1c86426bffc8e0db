"""Tiny upscale models of spandrel's own classes with seeded weights, and prompts that upscale with them.

python -m support.upscalers MODELS_DIR [NAME…]
"""

import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .graphs import Graph, Prompt, cp_config

_WINDOWS = {"img_size": 64, "embed_dim": 32, "num_heads": [2, 2], "upsampler": "pixelshuffledirect", "upscale": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "esrgan": ("ESRGAN:ESRGAN", {"in_nc": 3, "out_nc": 3, "num_filters": 8, "num_blocks": 1, "scale": 4}),
    "compact": ("Compact:Compact", {"num_in_ch": 3, "num_out_ch": 3, "num_feat": 8, "num_conv": 2, "upscale": 2}),
    "swinir": ("SwinIR:SwinIR", {**_WINDOWS, "depths": [2, 2], "window_size": 4, "mlp_ratio": 2.0, "resi_connection": "1conv"}),
    "dat": ("DAT:DAT", {**_WINDOWS, "depth": [1, 1], "split_size": [4, 4], "expansion_factor": 2.0, "resi_connection": "1conv"}),
    "gray": ("Compact:Compact", {"num_in_ch": 1, "num_out_ch": 1, "num_feat": 8, "num_conv": 2, "upscale": 2}),
    "wide_compact": ("Compact:Compact", {"num_in_ch": 3, "num_out_ch": 3, "num_feat": 64, "num_conv": 16, "upscale": 4}),
    "wide_esrgan": ("ESRGAN:ESRGAN", {"in_nc": 3, "out_nc": 3, "num_filters": 64, "num_blocks": 23, "scale": 4}),
}
"""By name: architecture and class, arguments. The wide ones are of the width that is published, for measurements."""

_nonces = itertools.count(1)


def write(models: str, *names: str) -> None:
    """Write files into the folder `upscale_models` of a ComfyUI models folder: by default all."""
    out = Path(models) / "upscale_models"
    out.mkdir(exist_ok=True)
    for name in names or MODELS:
        (path, arguments), generator = MODELS[name], torch.Generator().manual_seed([*MODELS].index(name))
        architecture, _, kind = path.partition(":")
        network = getattr(importlib.import_module(f"spandrel.architectures.{architecture}"), kind)(**arguments)
        weights = dict(network.eval().named_parameters())
        with torch.no_grad():
            for value in weights.values():
                if value.ndim > 1 and value.numel():
                    value.copy_(torch.randn(value.shape, generator=generator) * 0.8 / value[0].numel() ** 0.5)
            made = network(torch.rand(1, arguments.get("num_in_ch", 3), 16, 16, generator=generator))
            [*_, last] = (value for key, value in weights.items() if key.endswith("bias"))
            last += 0.5 - made.mean()  # else most of it would be cut at 0 or 1
        save_file({key: value.contiguous() for key, value in network.state_dict().items()}, out / f"{name}.safetensors")


def upscale_prompt(
    name: str,
    world: int | None = None,
    *,
    width: int = 700,
    height: int = 530,
    frames: int = 1,
    seed: int = 3,
    again: bool = False,
    **config: Any,
) -> Prompt:
    """A graph that upscales random pictures and saves the result in full precision.

    Args:
        world: ranks; None = ComfyUI's own node.
        again: run although ComfyUI has the result of the same node: with another timeout.
    """
    config |= {"step_timeout": 600.0 + next(_nonces)} if again else {}
    graph = Graph()
    ours = {} if world is None else {"cp_config": graph.add("cp_config", "CPConfig", **cp_config(world_size=world, **config))}
    model = graph.add("loader", "UpscaleModelLoader", model_name=f"{name}.safetensors")
    kind = "ImageUpscaleWithModel" if world is None else "CPUpscaleImage"
    size = {"width": width, "height": height, "frames": frames, "seed": seed}
    picture = graph.add("picture", "TestImage", **size)
    out = graph.add("run", kind, upscale_model=model, image=picture, **ours)
    graph.add("save", "SaveLatent", samples=graph.add("kept", "TestPicture", image=out), filename_prefix="upscaled")
    return graph.prompt


if __name__ == "__main__":
    write(*sys.argv[1:])
