"""Attention, a step of Flux and shared weights over links from free to hopeless: rounds of Ulysses, 8 bits, rings, the planner's
choice, diffusers; all blocks shared, and some.

    python benchmarks/links.py [--quick] [--ranks 2 3] [--repetitions 3]    # as root, on Linux

Every rank is in a network namespace of its own, and `tc` limits what it sends: while messages travel, the cores are free, as on
devices beside a network. Links are given by how long the exchange of Ulysses in one round takes, in times of its attention. All
variants run in the same processes, one thread each, in alternation; results are checked against one process first. A step has one
double and two single blocks of diffusers' FluxTransformer2DModel. *weights*: a step of one double and eleven single blocks, of
which ranks keep all whole, share all, or share some, as far from each other as they can be. Where there are fewer cores than ranks,
ranks also wait for cores.

s: seconds, median; a repetition is as long as its slowest rank takes.
one round / these: of those seconds; above 1 if these are faster.
best / chosen: of all numbers of rounds, and those that the planner takes from what it measured on that link.
exact / 8 bit: of the rounds that are chosen, and of as many as there may be.
diffusers / best: its Ulysses against the best of ours, its ring against the best of our rings.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import common
import diffusers_cp
import flux_step
import torch
import torch.distributed as dist
from alternating import alternate, check, keep_freed_memory
from attention import HEAD_DIM, HEADS, Layer
from flux_step import RANKS, TEXT_TOKENS, Step, build_model, make_inputs
from support.ranks import report
from torch import Tensor

from cp_runtime import ContextParallelConfig, apply_context_parallel
from cp_runtime.engine.cost import ROUNDS, AttentionShape, DegreePlanner
from cp_runtime.engine.measuring import measure
from cp_runtime.engine.ranks.config import EIGHT_BIT, SequenceSettings
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.engine.weights.blocks import sizes_of, spread
from cp_runtime.engine.weights.sharded import ShardedWeights

NAMESPACE, BRIDGE, OUTSIDE, INTERFACE = "cp-links-{}", "cp-links", "cp-links{}", "eth0"
CLONE_NEWNET = 0x40000000  # of the kernel's sched.h
LINKS = {"free": 0.0, "quarter": 0.25, "half": 0.5, "equal": 1.0, "double": 2.0, "hopeless": 6.0}
"""Seconds of the exchange over those of attention."""
BURST = 256 << 10  # bytes that pass at once; larger than what the kernel would cut into packets on the ranks' cores
QUEUE = 64 << 20  # bytes that wait; what is dropped would be sent again
TOKENS = 4096
TOLERANCE, TOLERANCE_OF_8_BITS = 1e-4, 0.5  # largest difference, in standard deviations
MODEL = dict(
    in_channels=16,
    num_layers=1,
    num_single_layers=2,
    attention_head_dim=HEAD_DIM,
    num_attention_heads=HEADS,
    joint_attention_dim=64,
    pooled_projection_dim=64,
    axes_dims_rope=(16, 24, 24),
)
PARTS = {"attention": [], "step": [2], "weights": [2]}
"""Numbers of ranks; none: those that were asked for."""
DEEP = {**flux_step.MODEL, "num_layers": 1, "num_single_layers": 11}
SHARED = (2, 12)  # of its blocks
WEIGHT_TOKENS = 512  # few, so that the link carries ten times as many bytes of weights as of attention: in Flux it is seven
WEIGHT_LINKS = {"free": 0.0, "as long": 1.0, "1.6 times": 1.6, "4 times": 4.0}
"""Seconds in which the link passes all blocks' other half, over those of a step with whole weights."""
RINGS = {"ring": "alltoall", "ring allgather": "allgather"}


def command(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True)


@contextmanager
def namespaces(ranks: int) -> Iterator[None]:
    """Network namespaces, one per rank, on one bridge."""
    remove_namespaces()  # of a run that was killed
    try:
        command("ip", "link", "add", BRIDGE, "type", "bridge")
        command("ip", "link", "set", BRIDGE, "up")
        for rank in range(ranks):
            name, outside = NAMESPACE.format(rank), OUTSIDE.format(rank)
            command("ip", "netns", "add", name)
            command("ip", "link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            command("ip", "link", "set", outside, "master", BRIDGE, "up")
            command("ip", "-n", name, "address", "add", f"10.77.0.{rank + 1}/24", "dev", INTERFACE)
            command("ip", "-n", name, "link", "set", INTERFACE, "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        remove_namespaces()


def remove_namespaces() -> None:
    """Remove what `namespaces` makes; a namespace's own end of a link goes some time after it."""
    links = [each for each in os.listdir("/sys/class/net") if each.startswith(BRIDGE)]
    names = [each.name for each in Path("/run/netns").glob(NAMESPACE.format("*"))]
    for words in (*(("link", "delete", link) for link in links), *(("netns", "delete", name) for name in names)):
        subprocess.run(["ip", *words], check=False, stderr=subprocess.DEVNULL)


def enter_namespace() -> None:
    """Move a rank into its own. What it starts from here on, gloo's threads included, is there as well."""
    with open(f"/run/netns/{NAMESPACE.format(sys.argv[1])}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def limit(bandwidth: float) -> None:
    """Let this rank send so many bytes per second; infinity is no limit."""
    subprocess.run(["tc", "qdisc", "delete", "dev", INTERFACE, "root"], check=False, stderr=subprocess.DEVNULL)
    if math.isfinite(bandwidth):
        rate = f"{round(8 * bandwidth)}bit"
        command("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, "burst", BURST, "limit", QUEUE)
    dist.barrier()


def variants_of(case: Layer | Step, world: int) -> dict[str, Callable[[], Tensor]]:
    """Return calls of every number of rounds that the heads allow, of every ring, and of diffusers."""
    rounds = [rounds for rounds in ROUNDS if HEADS // world >= rounds]
    theirs = {"ulysses": (1, world), "ring": (world, 1)} if HEADS % world == 0 else {"ring": (world, 1)}
    return {
        **{f"{each} rounds": case.ours(1, world, ulysses_rounds=each) for each in rounds},
        EIGHT_BIT: case.ours(1, world, ulysses_rounds=rounds[-1], exchange=EIGHT_BIT),
        **{name: case.ours(world, 1, rotate_method=method) for name, method in RINGS.items()},
        **{f"diffusers {mode}": case.theirs(*degrees) for mode, degrees in theirs.items()},
    }


class SomeBlocks(ShardedWeights):
    """Weights of some blocks, as ComfyUI's ranks share those that do not fit whole."""

    def __init__(self, count: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks = {block.name: block for block in spread(list(self.blocks.values()), count)}


def with_shared(count: int) -> Callable[[], Tensor]:
    """Return a step of a model, so many of whose blocks are shared."""
    model, inputs = build_model(DEEP), make_inputs(WEIGHT_TOKENS, DEEP)
    with patch("cp_runtime.diffusers.weights.ShardedWeights", partial(SomeBlocks, count)):
        apply_context_parallel(model, ContextParallelConfig(ulysses_degree=RANKS), shard_weights=count > 0)

    def run() -> Tensor:
        out: Tensor = model(**inputs)[0]
        return out

    return run


def weights_main(repetitions: int) -> None:
    """Time a step with whole weights against one where ranks fetch some of them."""
    variants = {str(count): with_shared(count) for count in (0, *SHARED)}
    nbytes = sizes_of(build_model(DEEP)).blocks * (RANKS - 1) / RANKS
    expected = variants["0"]()
    for name, run in variants.items():
        check(name, run(), expected, 0)
    whole = alternate({"0": variants["0"]}, 3)["0"].median
    for name, times_as_long in WEIGHT_LINKS.items():
        limit(nbytes / whole / times_as_long if times_as_long else math.inf)
        times = alternate(variants, repetitions)
        seconds = {count: each.median for count, each in times.items()}
        report(
            name=f"weights, {RANKS} ranks, {name}",
            ratios={f"{count} shared / whole": each / seconds["0"] for count, each in seconds.items() if count != "0"},
            s_whole=seconds["0"],
            MB_of_all_blocks=nbytes / 1e6,
            others=times["0"].others,
        )


@torch.inference_mode()
def rank_main(what: str, repetitions: int, links: list[str]) -> None:
    diffusers_cp.patch()
    keep_freed_memory()
    if what == "weights":
        weights_main(repetitions)
        return
    world, mesh = dist.get_world_size(), SequenceMesh(dist.group.WORLD)
    tokens = TOKENS // world * world if what == "attention" else TOKENS + TEXT_TOKENS
    case = Layer(tokens, mesh) if what == "attention" else Step(TOKENS, MODEL)
    variants = variants_of(case, world)
    for name, call in variants.items():
        tolerance = TOLERANCE_OF_8_BITS if name == EIGHT_BIT else TOLERANCE
        check(name, call(), case.expected, tolerance, case.expected.std())
    qkv = torch.randn(3, 1, HEADS // world, tokens, HEAD_DIM)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, *qkv)
    attend()
    alone = alternate({"attention": attend}, 3)["attention"].median
    sent = 4 * (world - 1) / world**2 * tokens * HEADS * HEAD_DIM * 4
    shape = AttentionShape(1, tokens, tokens, HEADS, HEADS, HEAD_DIM, 4)
    for name in links:
        limit(sent / alone / LINKS[name] if LINKS[name] else math.inf)
        rates = measure(mesh, torch.device("cpu")).of(range(world))
        settings = SequenceSettings(ring_degree=1, ulysses_degree=world)
        chosen = f"{DegreePlanner(settings, world, rates)(shape).ulysses_rounds} rounds"
        free = DegreePlanner(replace(settings, ring_degree=0, ulysses_degree=0), world, rates)(shape)
        times = alternate(variants, repetitions)
        median = {each: times[each].median for each in times}
        report(
            name=f"{what}, {world} ranks, {name}",
            ratios=ratios(median, chosen),
            chosen=chosen,
            of_all_modes=f"ring {free.ring_degree} x ulysses {free.ulysses_degree}",
            overlap=rates.overlap,
            MB_per_s=rates.bandwidth / 1e6,
            s_attention=alone,
            s_exchange=sent / rates.bandwidth,
            **{f"s {each}": seconds for each, seconds in median.items()},
            others=times[chosen].others,
        )


def ratios(seconds: Mapping[str, float], chosen: str) -> dict[str, float]:
    """What is wanted of them, from the median of every variant."""
    rounds = {name: each for name, each in seconds.items() if name.endswith(" rounds")}
    rings = [each for name, each in seconds.items() if name.startswith("ring")]
    found = {f"one round / {name}": rounds["1 rounds"] / each for name, each in rounds.items() if name != "1 rounds"}
    found["best / chosen"] = min(rounds.values()) / rounds[chosen]
    found["exact / 8 bit"] = rounds[chosen] / seconds[EIGHT_BIT]
    found["diffusers ring / best ring"] = seconds["diffusers ring"] / min(rings)
    if "diffusers ulysses" in seconds:
        found["diffusers ulysses / chosen"] = seconds["diffusers ulysses"] / rounds[chosen]
    return found


def main() -> None:
    options = common.options(
        __doc__,
        "three links and two repetitions: three minutes",
        ranks={"default": [2, 3], "help": "of attention; a step has two"},
        only={"nargs": "+", "choices": PARTS, "default": list(PARTS)},
        links={"nargs": "+", "choices": LINKS, "default": list(LINKS)},
        repetitions=5,
    )
    if os.geteuid() != 0 or sys.platform != "linux":
        common.show("links", not_run="network namespaces need Linux and root")
        return
    common.show("links", **common.machine(), heads=HEADS, head_dim=HEAD_DIM, dtype="float32", threads_per_rank=1)
    links = ["free", "equal", "hopeless"] if options.quick else options.links
    repetitions = 2 if options.quick else options.repetitions
    for what in options.only:
        for world in PARTS[what] or options.ranks:
            with namespaces(world):
                common.show_ranks(__file__, world, what=what, repetitions=repetitions, links=links)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        enter_namespace()
    common.run(main, rank_main)
