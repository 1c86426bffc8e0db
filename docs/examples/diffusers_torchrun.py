"""Context parallelism for a diffusers transformer, without ComfyUI.

    torchrun --nproc-per-node 2 docs/examples/diffusers_torchrun.py
    torchrun --nproc-per-node 4 docs/examples/diffusers_torchrun.py --ring-degree 2
    torchrun --nproc-per-node 2 docs/examples/diffusers_torchrun.py --model PATH --height 1024 --width 1024

Runs one step of a Flux transformer in every process alone and then in all of them together, and compares the two. Without
--model the transformer is tiny and random: nothing is downloaded, and a CPU is enough.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from cp_runtime import ContextParallelConfig, apply_context_parallel, remove_context_parallel


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="PATH", help="folder of a FluxTransformer2DModel, or of a pipeline that has one")
    parser.add_argument("--ring-degree", type=int, default=1, help="ranks on the ring axis; the rest go to Ulysses")
    parser.add_argument("--height", type=int, default=256, help="of the picture, in pixels")
    parser.add_argument("--width", type=int, default=240)
    parser.add_argument("--text-tokens", type=int, default=77)
    return parser.parse_args()


def pick_device() -> torch.device:
    """This process's accelerator where the machine has one for every process, else the CPU."""
    local_rank, processes = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.accelerator.device_count() < processes:
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(torch.accelerator.current_accelerator().type, local_rank)


def load_model(path: str | None, device: torch.device) -> FluxTransformer2DModel:
    """The model; the same weights in every process, as a checkpoint gives them."""
    if path is None:
        torch.manual_seed(0)
        model = FluxTransformer2DModel(
            in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=6,
            joint_attention_dim=64, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(8, 12, 12),
        )  # fmt: skip
        return model.eval().to(device)
    folder = "transformer" if (Path(path) / "transformer").is_dir() else None
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return FluxTransformer2DModel.from_pretrained(path, subfolder=folder, torch_dtype=dtype).eval().to(device)


def make_inputs(model: FluxTransformer2DModel, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One call, as the Flux pipeline makes it: the same in every process."""
    config, generator = model.config, torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, model.dtype)

    rows, columns = options.height // 16, options.width // 16
    grid = torch.cartesian_prod(torch.zeros(1), torch.arange(float(rows)), torch.arange(float(columns)))
    return dict(
        hidden_states=normal(1, rows * columns, config.in_channels),
        encoder_hidden_states=normal(1, options.text_tokens, config.joint_attention_dim),
        pooled_projections=normal(1, config.pooled_projection_dim),
        timestep=torch.full((1,), 0.7, device=device, dtype=model.dtype),
        guidance=torch.full((1,), 3.5, device=device, dtype=model.dtype) if config.guidance_embeds else None,
        img_ids=grid.to(device, model.dtype),
        txt_ids=torch.zeros(options.text_tokens, 3, device=device, dtype=model.dtype),
        return_dict=False,
    )


def timed(model: FluxTransformer2DModel, inputs: dict[str, Any], device: torch.device) -> tuple[torch.Tensor, float]:
    """Output and seconds of one step. A step before it warms up."""
    for _ in range(2):
        dist.barrier()
        started = time.perf_counter()
        (out,) = model(**inputs)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - started
    return out, seconds


def main() -> None:
    options, device = parse_arguments(), pick_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    rank, world = dist.get_rank(), dist.get_world_size()
    model = load_model(options.model, device)
    inputs = make_inputs(model, options, device)

    config = ContextParallelConfig(
        ring_degree=options.ring_degree,
        ulysses_degree=world // options.ring_degree,
        ulysses_anything=True,  # any number of tokens and heads; exact either way
        ring_anything=True,
    )
    with torch.inference_mode():
        alone, seconds_alone = timed(model, inputs, device)
        apply_context_parallel(model, config)
        together, seconds_together = timed(model, inputs, device)
        remove_context_parallel(model)

    if rank == 0:
        difference = (together - alone).abs().max() / alone.std()
        lines = [
            f"{world} x {device.type}, {inputs['hidden_states'].shape[1]} image and {options.text_tokens} text tokens",
            f"one process: {seconds_alone:.4f} s",
            f"{world} processes: {seconds_together:.4f} s (ring {config.ring_degree} x ulysses {config.ulysses_degree})",
            f"largest difference: {difference:.1e} standard deviations of the output",
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    # All ranks leave together: one that goes early takes its connections with it.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
