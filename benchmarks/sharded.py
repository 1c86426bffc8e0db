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
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import diffusers_cp
import torch
from common import note
from support import checkpoints
from support.checkpoints import Checkpoint, Flux
from support.graphs import flux_prompt
from support.processes import pss
from support.ranks import finish, report, run_ranks, start
from support.server import ComfyServer

from cp_runtime import ContextParallelConfig, apply_context_parallel
from cp_runtime.engine.weights.blocks import Sizes, sizes_of

RANKS = 2
LIMITED = 4  # ranks with a limit on their memory
TARGET = 1.15  # times the seconds with whole weights
PLACEMENTS = ("whole", "sharded", "offloaded")
LOOK = 0.05  # seconds between two looks at a rank's memory


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


def rank_main() -> None:
    _, world, (name, repetitions) = start()
    diffusers_cp.keep_freed_memory()
    models, inputs = {}, {}
    applied = {}
    for weights in ("whole", "sharded"):
        models[weights], inputs = MODELS[name]()  # seeded: the same twice
        config = ContextParallelConfig(ulysses_degree=world)
        applied[weights] = apply_context_parallel(models[weights], config, shard_weights=weights == "sharded")
    plan = applied["sharded"]
    assert plan is not None
    sizes = sizes_of(MODELS[name]()[0])
    with torch.inference_mode():
        outs = {weights: model(**inputs)[0] for weights, model in models.items()}
        if not torch.equal(outs["whole"], outs["sharded"]):
            raise RuntimeError(f"{name}: shared weights give other bits than whole ones")
        plan.mesh.stats.reset()
        models["sharded"](**inputs)
        sent = plan.mesh.stats.bytes["weights"]
        times = diffusers_cp.alternate({name: partial(model, **inputs) for name, model in models.items()}, int(repetitions))
    report(
        seconds={weights: time_.median for weights, time_ in times.items()},
        ratio=times["sharded"].over(times["whole"]),
        others=times["whole"].others,
        sent=sent,
        formula=sizes.blocks * (world - 1) / world,
    )
    finish()


def time_main(repetitions: int) -> None:
    print(f"{common.machine()}, {RANKS} ranks, float32")
    print("model    s whole  sharded   ratio (quartiles)          | link MB  formula | others")
    for name in MODELS:
        (row,) = run_ranks(Path(__file__), RANKS, name, str(repetitions), timeout=1200)
        low, middle, high = row["ratio"][1], row["ratio"][0], row["ratio"][2]
        note(f"sharded, {name}, seconds against whole", middle)
        print(
            f"{name:8} {row['seconds']['whole']:7.3f}  {row['seconds']['sharded']:7.3f}   {middle:.3f} ({low:.3f} to {high:.3f}), "
            f"target {TARGET} | {row['sent'] / 1e6:7.2f}  {row['formula'] / 1e6:7.2f} | {row['others']:.2f}",
            flush=True,
        )


class Watch:
    """The most that any rank of a server held since `begin`."""

    def __init__(self, server: ComfyServer) -> None:
        self._server, self.peak = server, 0
        threading.Thread(target=self._look, daemon=True).start()

    def begin(self) -> None:
        self.peak = 0

    def now(self) -> int:
        return max((pss(pid) for pid in self._server.worker_pids()), default=0)

    def _look(self) -> None:
        while True:
            try:
                self.peak = max(self.peak, self.now())
            except Exception:  # noqa: BLE001  (a rank or the server has ended)
                time.sleep(LOOK)
            time.sleep(LOOK)


def memory_main(ranks: int, gigabytes: float) -> None:
    """Whole, sharded and offloaded, each in a server of its own, through loading, a LoRA and `/free`."""
    architecture = of_size(gigabytes)
    checkpoints.CHECKPOINTS["flux_huge"] = Checkpoint(architecture=architecture)
    checkpoints.LORAS["flux_huge_lora"] = replace(checkpoints.LORAS["flux_lora"], base="flux_huge")
    sizes = sizes_in_file(architecture)
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        for name in ("flux", "flux_huge", "flux_huge_lora"):
            checkpoints.write(name, models)
        print(f"\n{sizes.whole / 1e9:.2f} GB of weights, largest block {sizes.largest / 1e9:.3f} GB, on {ranks} ranks; PSS in GB")
        print("           without a model | loading  resident  loading LoRA  with LoRA  after /free | bound")
        for placement in PLACEMENTS:
            with ComfyServer(common.comfyui(), models=models) as server:
                watch = Watch(server)
                cp = {"world_size": ranks, "weights": placement}
                run(server, "flux", cp)
                server.free()
                run(server, "flux", cp)
                base, seen = watch.now(), []
                for loras in ((), ("flux_huge_lora",)):
                    watch.begin()
                    run(server, "flux_huge", cp, loras=loras)
                    seen += [watch.peak, watch.now()]
                server.free()
                time.sleep(3)
                seen.append(watch.now())
                held = sizes.whole if placement == "whole" else sizes.per_rank(ranks)  # on CPU ranks the host is the device
                figures = "".join(f"{value / 1e9:10.2f}" for value in seen)
                print(f"{placement:10} {base / 1e9:15.2f} |{figures} | {base / 1e9 + 1.1 * held / 1e9:.2f}", flush=True)


class Groups:
    """Control groups inside of that of this process, with a limit on the memory of the processes in each."""

    def __init__(self, limit: float) -> None:
        self._limit = int(limit)
        named = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        own = next((Path("/sys/fs/cgroup/memory") / path.lstrip("/") for _, kinds, path in named if kinds == "memory"), None)
        self._parent = own or Path("/sys/fs/cgroup") / next(path for _, kinds, path in named if not kinds).lstrip("/")
        self._file, self._peak = ("memory.limit_in_bytes", "memory.max_usage_in_bytes") if own else ("memory.max", "memory.peak")
        self._made: list[Path] = []

    def take(self, pid: int) -> None:
        """Put a process into a group of its own. What it holds already does not count."""
        group = self._parent / f"benchmark-{pid}"
        group.mkdir()
        self._made.append(group)
        (group / self._file).write_text(str(self._limit))
        (group / "cgroup.procs").write_text(str(pid))

    @property
    def most(self) -> int:
        """Bytes that the processes of one group took, at most."""
        return max(int((group / self._peak).read_text()) for group in self._made)

    def remove(self) -> None:
        """Their processes have ended, or end."""
        deadline = time.monotonic() + 10
        while self._made:
            try:
                self._made[-1].rmdir()
                self._made.pop()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


@contextlib.contextmanager
def limited(models: Path, limit: float) -> Iterator[tuple[ComfyServer, Groups | None]]:
    """A server whose ranks are there and may take so many bytes each; and their groups, where the kernel sees to that, too."""
    groups: Groups | None
    groups = made = Groups(limit)
    try:
        with ComfyServer(common.comfyui(), models=models) as server:
            run(server, "flux", {"world_size": LIMITED})
            for _ in range(10):  # it takes effect when ComfyUI's queue comes to it
                server.free()
                time.sleep(1)
                if not server.get("/context_parallel/status")["models"]:
                    break
            try:
                for pid in server.worker_pids():
                    made.take(pid)
            except OSError as error:
                groups = None
                print(f"no control group can be made ({error})")
            yield server, groups
    finally:
        made.remove()


def limit_main() -> None:
    """A model that no rank may hold whole: what whole and auto say, and how far the latent is from that of one process."""
    architecture = Flux(hidden=768, double_blocks=8, single_blocks=40)
    checkpoints.CHECKPOINTS["flux_deep_large"] = Checkpoint(architecture=architecture)
    checkpoints.LORAS["flux_deep_large_lora"] = replace(checkpoints.LORAS["flux_lora"], base="flux_deep_large")
    sizes = sizes_in_file(architecture)
    limit = 1.1 * sizes.per_rank(LIMITED) + 0.1e9  # the weights that the LoRA changes are more, and are copies of the file's
    settings: dict[str, Any] = {"ckpt": "flux_deep_large", "steps": 2, "loras": ("flux_deep_large_lora",)}
    print(f"\n{sizes.whole / 1e9:.2f} GB of weights and a LoRA on {LIMITED} ranks of at most {limit / 1e9:.2f} GB each")
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        for name in ("flux", "flux_deep_large", "flux_deep_large_lora"):
            checkpoints.write(name, models)
        with ComfyServer(common.comfyui(), models=models) as server:
            expected = server.sample(flux_prompt(**settings), timeout=900)
        for weights, memory in (("whole", 0.0), ("whole", limit / 1e9), ("auto", limit / 1e9)):
            with limited(models, limit) as (server, groups):
                if groups is None and not memory:
                    continue
                cp = {"world_size": LIMITED, "weights": weights, "memory_per_rank": memory}
                result = server.run(flux_prompt(cp=cp, **settings), timeout=900)
                said = "limit by the kernel" + (" and memory_per_rank" if memory else "") if groups else "memory_per_rank"
                if result.error is not None:
                    print(f"{weights:6} {said}: {result.error.exception_message.strip().splitlines()[0]}", flush=True)
                    continue
                difference = (server.latent(result) - expected).abs().max() / expected.std()
                placed = server.get("/context_parallel/status")["weights"]["flux_deep_large.safetensors"]
                took = f"a rank took {groups.most / 1e9:.2f} GB; " if groups else ""
                print(f"{weights:6} {said}: {placed}; {took}{difference:.1e} standard deviations from one process", flush=True)


def of_size(gigabytes: float) -> Flux:
    """Flux of a width and depth with about so many GB of float32."""
    hidden = 1536
    blocks = gigabytes * 1e9 / 4 / hidden**2 / (36 + 15 * 3)  # a double block has 36 squares of weights, a single one 15
    return Flux(hidden=hidden, double_blocks=max(1, round(blocks)), single_blocks=max(1, round(3 * blocks)))


def sizes_in_file(architecture: Flux) -> Sizes:
    """What the blocks of a file take."""
    blocks: dict[str, int] = {}
    rest = 0
    for init in architecture.tensors():
        nbytes = 4 * torch.Size(init.shape).numel()
        if "blocks." in init.name:
            name = ".".join(init.name.split(".")[:2])
            blocks[name] = blocks.get(name, 0) + nbytes
        else:
            rest += nbytes
    return Sizes(sum(blocks.values()), max(blocks.values()), rest)


def run(server: ComfyServer, ckpt: str, cp: dict[str, Any], **settings: Any) -> None:
    server.run(flux_prompt(ckpt=ckpt, steps=1, cp=cp, **settings), timeout=900).check()


def main() -> None:
    options = common.options(
        __doc__,
        "a checkpoint of 1 GB on 2 ranks, few repetitions",
        ranks={"type": int, "nargs": "+", "default": [2, 4], "help": "for memory"},
        gigabytes=4.0,
        repetitions={"type": int, "default": 5, "help": "at least 2"},
        only={"nargs": "+", "choices": ("time", "memory", "limit"), "default": ["time"]},
    )
    if "time" in options.only:
        time_main(2 if options.quick else options.repetitions)
    for ranks in ([2] if options.quick else options.ranks) if "memory" in options.only else ():
        memory_main(ranks, 1.0 if options.quick else options.gigabytes)
    if "limit" in options.only:
        limit_main()


if __name__ == "__main__":
    common.run(main, rank_main)
