"""Weights of which every rank keeps a part: seconds per call against whole weights, and the memory of every rank.

    make bench, or COMFYUI_PATH=... python benchmarks/sharded.py [--quick] [--only time memory limit] [--ranks 2 4] [--gigabytes 4]

Time: diffusers' transformers, smaller in width and depth, with random weights, on two CPU ranks over gloo, one thread each; whole
and shared weights in alternation, with the same bits as result. On CPU ranks fetching a block and computing share the cores, so
that nothing of it is hidden: see *link* for what is sent.
Memory (by `--only`): a ComfyUI server and its ranks, with a Flux checkpoint of some GB. PSS of the rank that needs most, looked at
every 50 ms; a page of the file that N processes read counts 1/N in each. *bound*: 1/N of the blocks, two blocks and what is outside
of blocks, 10 % more, and what the same rank holds without a model.
Limit (by `--only`): every rank is in a control group of its own, with less memory than the whole model with a LoRA takes, and
`memory_per_rank` says the same. Needs a group that this process may divide; without one, `memory_per_rank` alone limits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from alternating import alternate, check, keep_freed_memory
from support import checkpoints
from support.architectures import Flux
from support.checkpoints import Checkpoint
from support.graphs import flux_prompt
from support.processes import pss
from support.ranks import report
from support.server import ComfyServer

from cp_runtime import ContextParallelConfig, apply_context_parallel
from cp_runtime.engine.weights.blocks import Sizes, sizes_of

RANKS = 2
LIMITED = 4  # ranks with a limit on their memory
TARGET = 1.15  # times the seconds with whole weights
LOOK = 0.05  # seconds between two looks at a rank's memory
CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def flux() -> tuple[torch.nn.Module, dict[str, Any]]:
    """A transformer and the arguments of one call, of 4,352 tokens."""
    from flux_step import build_model, make_inputs

    return build_model(), make_inputs(4096)


def wan() -> tuple[torch.nn.Module, dict[str, Any]]:
    """The same for video: 4,680 tokens."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=8, attention_head_dim=128, text_dim=64, ffn_dim=4096, num_layers=6, in_channels=16, out_channels=16
    ).eval()
    inputs = {
        "hidden_states": torch.randn(1, 16, 13, 36, 40),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 64, 64),
        "return_dict": False,
    }
    return model, inputs


MODELS = {"flux": flux, "wan": wan}


@torch.inference_mode()
def rank_main(name: str, repetitions: int) -> None:
    keep_freed_memory()
    world = dist.get_world_size()
    whole, sharded = (MODELS[name]() for _ in range(2))  # seeded: the same twice
    blocks, config = sizes_of(whole[0]).blocks, ContextParallelConfig(ulysses_degree=world)
    apply_context_parallel(whole[0], config)
    stats = apply_context_parallel(sharded[0], config, shard_weights=True).mesh.stats
    check(name, sharded[0](**sharded[1])[0], whole[0](**whole[1])[0], 0)
    stats.reset()
    variants = {"whole": partial(whole[0], **whole[1]), "sharded": partial(sharded[0], **sharded[1])}
    variants["sharded"]()
    sent = stats.bytes["weights"]
    times = alternate(variants, repetitions)
    ratio = times["sharded"].over(times["whole"])
    report(
        name=name,
        ratios={"seconds against whole": ratio[0]},
        quartiles=ratio,
        target=TARGET,
        s_whole=times["whole"].median,
        s_sharded=times["sharded"].median,
        link_MB=sent / 1e6,
        by_formula=blocks * (world - 1) / world / 1e6,
        others=times["whole"].others,
    )


def watch(server: ComfyServer, peak: list[int]) -> None:
    """Keep the most that any rank of a server held since `peak` was made [0], until the server ends."""
    while True:
        with contextlib.suppress(Exception):  # a rank or the server has ended
            peak[0] = max(peak[0], held(server))
        time.sleep(LOOK)


def held(server: ComfyServer) -> int:
    """What the rank holds that holds most, in bytes."""
    return max((pss(pid) for pid in server.worker_pids()), default=0)


@contextlib.contextmanager
def written(name: str, architecture: Flux) -> Iterator[tuple[Path, Sizes]]:
    """A folder with a small model, one of this architecture and a LoRA for it; and what the blocks of its file take."""
    checkpoints.CHECKPOINTS[name] = Checkpoint(architecture=architecture)
    checkpoints.LORAS[f"{name}_lora"] = replace(checkpoints.LORAS["flux_lora"], base=name)
    sizes: Counter[str] = Counter()
    for init in architecture.tensors():
        block = ".".join(init.name.split(".")[:2]) if "blocks." in init.name else ""
        sizes[block] += 4 * torch.Size(init.shape).numel()
    rest = sizes.pop("", 0)
    with common.models("flux", name, f"{name}_lora") as models:
        yield models, Sizes(sizes.total(), max(sizes.values()), rest)


def memory_main(ranks: int, gigabytes: float) -> None:
    """Whole, sharded and offloaded, each in a server of its own, through loading, a LoRA and `/free`."""
    hidden = 1536
    blocks = gigabytes * 1e9 / 4 / hidden**2 / (36 + 15 * 3)  # a double block has 36 squares of weights, a single one 15
    architecture = Flux(hidden=hidden, double_blocks=max(1, round(blocks)), single_blocks=max(1, round(3 * blocks)))
    with written("flux_huge", architecture) as (models, sizes):
        common.show(f"memory, {ranks} ranks, PSS", GB_of_weights=sizes.whole / 1e9, GB_of_the_largest_block=sizes.largest / 1e9)
        for placement in ("whole", "sharded", "offloaded"):
            with ComfyServer(common.comfyui(), models=models) as server:
                peak, cp, seen = [0], {"world_size": ranks, "weights": placement}, {}
                threading.Thread(target=watch, args=(server, peak), daemon=True).start()
                run(server, "flux", cp)
                server.free()
                run(server, "flux", cp)
                base = held(server)
                for step, loras in (("resident", ()), ("LoRA", ("flux_huge_lora",))):
                    peak[0] = 0
                    run(server, "flux_huge", cp, loras=loras)
                    seen |= {f"loading, {step}": peak[0], step: held(server)}
                server.free()
                time.sleep(3)
                seen["after /free"] = held(server)
                least = sizes.whole if placement == "whole" else sizes.per_rank(ranks)  # on CPU ranks the host is the device
                figures = {"without a model": base, **seen, "bound": base + 1.1 * least}
                common.show(f"{placement}, GB", **{name: value / 1e9 for name, value in figures.items()})


@contextlib.contextmanager
def limited(models: Path, limit: float) -> Iterator[tuple[ComfyServer, list[Path]]]:
    """A server whose ranks are there and may take so many bytes each; and their control groups, where the kernel sees to that, too.

    The groups are inside that of this process. What a rank holds already does not count.
    """
    named = {kinds: path.lstrip("/") for _, kinds, path in (line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines())}
    parent = CGROUPS / "memory" / named["memory"] if "memory" in named else CGROUPS / named[""]
    made: list[Path] = []
    try:
        with ComfyServer(common.comfyui(), models=models) as server:
            run(server, "flux", {"world_size": LIMITED})
            server.free_workers()
            try:
                for pid in server.worker_pids():
                    made.append(parent / f"benchmark-{pid}")
                    made[-1].mkdir()
                    group_file(made[-1], "limit_in_bytes", "max").write_text(str(int(limit)))
                    (made[-1] / "cgroup.procs").write_text(str(pid))
                taken = made
            except OSError as error:
                taken = []
                print(f"no control group can be made ({error})")
            yield server, taken
    finally:
        for group in filter(Path.exists, made):
            remove(group)


def group_file(group: Path, first: str, second: str) -> Path:
    """A file about the memory of a control group, by its names in versions 1 and 2."""
    return group / f"memory.{first if CGROUPS / 'memory' in group.parents else second}"


def remove(group: Path) -> None:
    """Remove a control group whose processes end."""
    deadline = time.monotonic() + 10
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def limit_main() -> None:
    """A model that no rank may hold whole: what whole and auto say, and how far the latent is from that of one process."""
    name = "flux_deep_large"
    settings: dict[str, Any] = {"ckpt": name, "steps": 2, "loras": (f"{name}_lora",)}
    with written(name, Flux(hidden=768, double_blocks=8, single_blocks=40)) as (models, sizes):
        limit = 1.1 * sizes.per_rank(LIMITED) + 0.1e9  # the weights that the LoRA changes are more, and are copies of the file's
        common.show(f"limit, {LIMITED} ranks, a LoRA", GB_of_weights=sizes.whole / 1e9, GB_for_each_rank=limit / 1e9)
        with ComfyServer(common.comfyui(), models=models) as server:
            expected = server.sample(flux_prompt(**settings), timeout=900)
        for weights, memory in (("whole", 0.0), ("whole", limit / 1e9), ("auto", limit / 1e9)):
            with limited(models, limit) as (server, groups):
                if not groups and not memory:
                    continue
                cp = {"world_size": LIMITED, "weights": weights, "memory_per_rank": memory}
                result = server.run(flux_prompt(cp=cp, **settings), timeout=900)
                by = " and ".join([*(["the kernel"] if groups else []), *(["memory_per_rank"] if memory else [])])
                if result.error is not None:
                    common.show(f"{weights}, limited by {by}", says=result.error.exception_message.strip().splitlines()[0])
                    continue
                difference = ((server.latent(result) - expected).abs().max() / expected.std()).item()
                placed = server.get("/context_parallel/status")["weights"][f"{name}.safetensors"]
                peaks = [int(group_file(group, "max_usage_in_bytes", "peak").read_text()) for group in groups]
                took = {"GB_of_a_rank": max(peaks) / 1e9} if peaks else {}
                common.show(f"{weights}, limited by {by}", weights=placed, **took, std_from_one_process=difference)


def run(server: ComfyServer, ckpt: str, cp: dict[str, Any], **settings: Any) -> None:
    server.run(flux_prompt(ckpt=ckpt, steps=1, cp=cp, **settings), timeout=900).check()


def main() -> None:
    options = common.options(
        __doc__,
        "a checkpoint of 1 GB on 2 ranks, few repetitions",
        ranks={"default": [2, 4], "help": "for memory"},
        gigabytes=4.0,
        repetitions={"default": 5, "help": "at least 2"},
        only={"nargs": "+", "choices": ("time", "memory", "limit"), "default": ["time"]},
    )
    common.show("sharded", **common.machine(), dtype="float32")
    for name in MODELS if "time" in options.only else ():
        common.show_ranks(__file__, RANKS, name=name, repetitions=2 if options.quick else options.repetitions)
    for ranks in ([2] if options.quick else options.ranks) if "memory" in options.only else ():
        memory_main(ranks, 1.0 if options.quick else options.gigabytes)
    if "limit" in options.only:
        limit_main()


if __name__ == "__main__":
    common.run(main, rank_main)
