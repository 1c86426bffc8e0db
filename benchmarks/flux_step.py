"""One step of a Flux transformer: one process, diffusers' own context parallelism and this package's, on CPU ranks over gloo.

    make bench, or python benchmarks/flux_step.py [--quick] [--images 2048 4096] [--repetitions 5]

The model is diffusers' FluxTransformer2DModel, smaller in width and depth, with random weights. All variants run in the same two
processes, one thread each, in alternation, on the same weights: diffusers cannot undo enable_parallelism, so each of its two modes
has a model of its own that shares the parameters of the first. What one process takes is rank 0's time while rank 1 sleeps in a
collective, so that it has its core, the caches and the memory to itself.

seconds: median; a repetition is as long as its slowest rank takes.
speed-up: one process' seconds / these.
of diffusers: diffusers' seconds in the same mode / ours, above 1 if ours is faster; in brackets the quartiles of that ratio within
single rounds. diffusers gathers in its ring, so both ways of ours to rotate are compared with that.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import common
import diffusers_cp
import torch
import torch.distributed as dist
from common import note
from diffusers import FluxTransformer2DModel
from support.ranks import finish, report, run_ranks, start
from torch import Tensor, nn

from cp_runtime import ContextParallelConfig, apply_context_parallel, remove_context_parallel

RANKS = 2
TEXT_TOKENS = 256
TOLERANCE = 1e-4  # in standard deviations of the output
TARGET = 1.85  # speed-up of two ranks over one process
MODEL = dict(
    in_channels=16,
    num_layers=2,
    num_single_layers=4,
    attention_head_dim=128,
    num_attention_heads=8,
    joint_attention_dim=64,
    pooled_projection_dim=64,
    axes_dims_rope=(16, 56, 56),
)


def build_model() -> nn.Module:
    """The transformer, with weights that keep activations near one and let every token depend on every other."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(**MODEL).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm_q.weight", "norm_k.weight", "norm_added_q.weight", "norm_added_k.weight")):
            parameter.data.fill_(1.4)
    return model


def with_same_parameters(model: nn.Module) -> nn.Module:
    """Another model, on the same tensors."""
    with torch.device("meta"):
        other = type(model)(**MODEL).eval()
    other.load_state_dict(model.state_dict(), assign=True)
    return other


def make_inputs(image_tokens: int) -> dict[str, Any]:
    """One call's arguments; the same on every rank."""
    generator = torch.Generator().manual_seed(image_tokens)
    side = 64
    image_ids = torch.zeros(image_tokens, 3)
    image_ids[:, 1], image_ids[:, 2] = torch.arange(image_tokens) // side, torch.arange(image_tokens) % side
    return {
        "hidden_states": torch.randn(1, image_tokens, MODEL["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, MODEL["joint_attention_dim"], generator=generator),
        "pooled_projections": torch.randn(1, MODEL["pooled_projection_dim"], generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": image_ids,
        "txt_ids": torch.zeros(TEXT_TOKENS, 3),
        "return_dict": False,
    }


def rank_main() -> None:
    rank, world, (options,) = start()
    diffusers_cp.patch()
    diffusers_cp.keep_freed_memory()
    settings = json.loads(options)
    model = build_model()
    their_models = {}
    for mode, degrees in (("ulysses", (1, world)), ("ring", (world, 1))):
        their_models[mode] = with_same_parameters(model)
        their_models[mode].enable_parallelism(config=diffusers_cp.context_parallel_config(*degrees))
    our_configs = {
        "ulysses": ContextParallelConfig(ulysses_degree=world),
        "ring, alltoall": ContextParallelConfig(ring_degree=world, rotate_method="alltoall"),
        "ring, allgather": ContextParallelConfig(ring_degree=world, rotate_method="allgather"),
    }
    our_models = {}
    for name, config in our_configs.items():
        our_models[name] = with_same_parameters(model)
        apply_context_parallel(our_models[name], config, model._cp_plan)

    def one_process(inputs: dict[str, Any]) -> Tensor | None:
        return model(**inputs)[0] if rank == 0 else None

    def sharded(parallel: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return parallel(**inputs)[0]

    with torch.inference_mode():
        for image_tokens in settings["images"]:
            inputs = make_inputs(image_tokens)
            variants = {
                "one process": partial(one_process, inputs),
                **{f"diffusers, {mode}": partial(sharded, parallel, inputs) for mode, parallel in their_models.items()},
                **{f"ours, {name}": partial(sharded, parallel, inputs) for name, parallel in our_models.items()},
            }
            expected = model(**inputs)[0]
            for name, call in variants.items():
                out = call()
                difference = torch.zeros(()) if out is None else (out - expected).abs().max() / expected.std()
                dist.all_reduce(difference, dist.ReduceOp.MAX)
                if not difference <= TOLERANCE:
                    raise RuntimeError(f"{name}, {image_tokens} image tokens: differs from one process by {difference:.1e} sigma")
            del expected, out
            times = diffusers_cp.alternate(variants, settings["repetitions"])
            for name, time_ in times.items():
                rival = f"diffusers, {name.split(', ')[1]}" if name.startswith("ours") else None
                report(
                    name=name,
                    tokens=TEXT_TOKENS + image_tokens,
                    seconds=time_.median,
                    others=time_.others,
                    speed_up=times["one process"].median / time_.median,
                    rival=times[rival].over(time_) if rival else None,
                )
    for parallel in our_models.values():
        remove_context_parallel(parallel, model._cp_plan)
    finish()


def main() -> None:
    images = {"type": int, "nargs": "+", "default": [2048], "help": f"image tokens, besides {TEXT_TOKENS} of text"}
    options = common.options(__doc__, "two repetitions", images=images, repetitions=5)
    hidden, blocks = MODEL["attention_head_dim"] * MODEL["num_attention_heads"], (MODEL["num_layers"], MODEL["num_single_layers"])
    print(f"{common.machine()}, one thread per rank")
    print(f"Flux, hidden {hidden}, {blocks[0]} double and {blocks[1]} single blocks, float32, {RANKS} ranks")
    for image_tokens in options.images:
        settings = {"images": [image_tokens], "repetitions": 2 if options.quick else options.repetitions}
        rows = run_ranks(Path(__file__), RANKS, json.dumps(settings), timeout=1200)
        print(f"\n{rows[0]['tokens']} tokens{' ':14}seconds  speed-up  of diffusers")
        for row in rows:
            rival = "{:.3f} ({:.3f} to {:.3f})".format(*row["rival"]) if row["rival"] else ""
            if row["name"] != "one process":
                note(f"flux step, {row['tokens']} tokens, {row['name']}, speed-up", row["speed_up"])
            print(f"{row['name']:24}{row['seconds']:8.3f}{row['speed_up']:10.3f}  {rival}".rstrip())
        best = max(row["speed_up"] for row in rows if row["name"].startswith("ours"))
        print(
            f"best of ours: {best:.2f} times as fast as one process, target {TARGET}; "
            f"other processes kept {rows[0]['others']:.2f} cores busy",
            flush=True,
        )


if __name__ == "__main__":
    common.run(main, rank_main)
