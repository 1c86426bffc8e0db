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
others: cores that other processes kept busy meanwhile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import common
import diffusers_cp
import torch
import torch.distributed as dist
from alternating import alternate, check, keep_freed_memory
from diffusers import FluxTransformer2DModel
from support.ranks import report
from torch import Tensor, nn

from cp_runtime import ContextParallelConfig, apply_context_parallel

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


@torch.inference_mode()
def rank_main(image_tokens: int, repetitions: int) -> None:
    diffusers_cp.patch()
    keep_freed_memory()
    world, model, inputs = dist.get_world_size(), build_model(), make_inputs(image_tokens)

    def one_process() -> Tensor | None:
        return model(**inputs)[0] if dist.get_rank() == 0 else None

    def sharded(parallel: nn.Module) -> Tensor:
        return parallel(**inputs)[0]

    variants = {"one process": one_process}
    rivals = {}
    for mode, degrees in (("ulysses", (1, world)), ("ring", (world, 1))):
        theirs = with_same_parameters(model)
        theirs.enable_parallelism(config=diffusers_cp.context_parallel_config(*degrees))
        variants[f"diffusers, {mode}"] = partial(sharded, theirs)
        for method in ("alltoall", "allgather") if mode == "ring" else ("",):
            name, ours = f"ours, {mode}{method and f', {method}'}", with_same_parameters(model)
            config = ContextParallelConfig(ring_degree=degrees[0], ulysses_degree=degrees[1], rotate_method=method or "allgather")
            apply_context_parallel(ours, config, model._cp_plan)
            variants[name], rivals[name] = partial(sharded, ours), f"diffusers, {mode}"
    expected = model(**inputs)[0]
    for name, call in variants.items():
        check(name, call(), expected, TOLERANCE, expected.std())
    del expected
    times = alternate(variants, repetitions)
    for name, each in times.items():
        report(
            name=f"{TEXT_TOKENS + image_tokens} tokens, {name}",
            ratios={} if name == "one process" else {"speed-up": times["one process"].median / each.median},
            seconds=each.median,
            others=each.others,
            **({"of diffusers": times[rivals[name]].over(each)} if name in rivals else {}),
        )


def main() -> None:
    images = {"type": int, "nargs": "+", "default": [2048], "help": f"image tokens, besides {TEXT_TOKENS} of text"}
    options = common.options(__doc__, "two repetitions", images=images, repetitions=5)
    common.show("flux step", **common.machine(), ranks=RANKS, threads_per_rank=1, dtype="float32", **MODEL)
    for image_tokens in options.images:
        repetitions = 2 if options.quick else options.repetitions
        rows = common.show_ranks(__file__, RANKS, image_tokens=image_tokens, repetitions=repetitions)
        best = max(row["ratios"]["speed-up"] for row in rows if ", ours, " in row["name"])
        print(f"best of ours: {best:.2f} times as fast as one process, target {TARGET}", flush=True)


if __name__ == "__main__":
    common.run(main, rank_main)
