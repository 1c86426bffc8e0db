"""One step of a Flux transformer: one process, diffusers' own context parallelism and this package's, on CPU ranks over gloo.

    make bench, or python benchmarks/flux_step.py [--quick] [--images 2048 4096] [--repetitions 5]

The model is diffusers' FluxTransformer2DModel, smaller in width and depth, with random weights. All variants run in the same two
processes, one thread each, in alternation, on the same weights. What one process takes is rank 0's time while rank 1 sleeps in a
collective, so that it has its core, the caches and the memory to itself.

seconds: median; a repetition is as long as its slowest rank takes.
speed-up: one process' seconds / these.
of diffusers: diffusers' seconds in the same mode / ours, above 1 if ours is faster; in brackets the quartiles of that ratio within
single rounds. diffusers gathers in its ring, so both ways of ours to rotate are compared with that.
others: cores that other processes kept busy meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def build_model(config: Mapping[str, Any] = MODEL) -> nn.Module:
    """Return the transformer, with weights that keep activations near one and let every token depend on every other."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(**config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm_q.weight", "norm_k.weight", "norm_added_q.weight", "norm_added_k.weight")):
            parameter.data.fill_(1.4)
    return model


def make_inputs(image_tokens: int, config: Mapping[str, Any] = MODEL) -> dict[str, Any]:
    """Return one call's arguments; the same on every rank."""
    generator = torch.Generator().manual_seed(image_tokens)
    side = 64
    image_ids = torch.zeros(image_tokens, 3)
    image_ids[:, 1], image_ids[:, 2] = torch.arange(image_tokens) // side, torch.arange(image_tokens) % side
    return {
        "hidden_states": torch.randn(1, image_tokens, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, config["joint_attention_dim"], generator=generator),
        "pooled_projections": torch.randn(1, config["pooled_projection_dim"], generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": image_ids,
        "txt_ids": torch.zeros(TEXT_TOKENS, 3),
        "return_dict": False,
    }


class Step:
    """One step, in one process and by both packages.

    diffusers cannot undo enable_parallelism, so every call has a model of its own that shares the parameters of the first.

    Attributes:
        expected: what one process makes of it.
    """

    def __init__(self, image_tokens: int, config: Mapping[str, Any] = MODEL) -> None:
        self._config, self._model, self._inputs = config, build_model(config), make_inputs(image_tokens, config)
        self.expected = self._run(self._model)

    def _run(self, model: nn.Module) -> Tensor:
        out: Tensor = model(**self._inputs)[0]
        return out

    def _copy(self) -> nn.Module:
        """Return another model, on the same tensors."""
        with torch.device("meta"):
            other = FluxTransformer2DModel(**self._config).eval()
        other.load_state_dict(self._model.state_dict(), assign=True)
        return other

    def one_process(self) -> Tensor | None:
        """Compute on rank 0 alone."""
        return self._run(self._model) if dist.get_rank() == 0 else None

    def ours(self, ring: int, ulysses: int, **settings: Any) -> Callable[[], Tensor]:
        """Return a call of this package's; for `settings` see `ContextParallelConfig`."""
        model, config = self._copy(), ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, **settings)
        apply_context_parallel(model, config, self._model._cp_plan)
        return partial(self._run, model)

    def theirs(self, ring: int, ulysses: int) -> Callable[[], Tensor]:
        """Return a call of diffusers'."""
        model = self._copy()
        model.enable_parallelism(config=diffusers_cp.context_parallel_config(ring, ulysses))
        return partial(self._run, model)


@torch.inference_mode()
def rank_main(image_tokens: int, repetitions: int) -> None:
    diffusers_cp.patch()
    keep_freed_memory()
    world, step = dist.get_world_size(), Step(image_tokens)
    variants: dict[str, Callable[[], Tensor | None]] = {"one process": step.one_process}
    rivals = {}
    for mode, degrees in (("ulysses", (1, world)), ("ring", (world, 1))):
        variants[f"diffusers, {mode}"] = step.theirs(*degrees)
        for method in ("alltoall", "allgather") if mode == "ring" else ("",):
            name = f"ours, {mode}{method and f', {method}'}"
            variants[name], rivals[name] = step.ours(*degrees, rotate_method=method or "allgather"), f"diffusers, {mode}"
    for name, call in variants.items():
        check(name, call(), step.expected, TOLERANCE, step.expected.std())
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
    images = {"default": [2048], "help": f"image tokens, besides {TEXT_TOKENS} of text"}
    options = common.options(__doc__, "two repetitions", images=images, repetitions=5)
    common.show("flux step", **common.machine(), ranks=RANKS, threads_per_rank=1, dtype="float32", **MODEL)
    for image_tokens in options.images:
        repetitions = 2 if options.quick else options.repetitions
        rows = common.show_ranks(__file__, RANKS, image_tokens=image_tokens, repetitions=repetitions)
        best = max(row["ratios"]["speed-up"] for row in rows if ", ours, " in row["name"])
        print(f"best of ours: {best:.2f} times as fast as one process, target {TARGET}", flush=True)


if __name__ == "__main__":
    common.run(main, rank_main)
