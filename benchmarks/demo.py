"""The main job on this machine: the Flux workflow through a real ComfyUI server, one CPU rank against several.

    make demo, or COMFYUI_PATH=... python benchmarks/demo.py [--ranks 2] [--steps 4] [--size 1024]

First a page of digits from one rank and from several, by a small Flux that has learned to draw them. It is too small to gain time:
that is measured on a larger one with random weights, whose picture is noise; time, progress and the comparison are real.
Text encoders and VAE are left out of the workflow: their files are not here. One thread per rank, so that one rank has one core
and N ranks have N.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
from digits import graphs, page, reader
from PIL import Image
from support import checkpoints
from support.graphs import cp_config
from support.processes import OtherPrograms
from support.server import CUSTOM_NODES, ComfyServer

WORKFLOW = common.ROOT / "workflows" / "api" / "Flux on all GPUs.json"
TEXT_TOKENS = 256
DIGITS = "31412718"
SHOWN = 2  # rows of the page, in the terminal
LEFT_OVER = 0.95  # of the cores that the ranks need, at least: else other programs have changed what is measured


@dataclass(frozen=True)
class Sampled:
    """A run of the workflow.

    Args:
        seconds: per step, without the first one.
        others: cores that other programs used in that time.
        file: that ComfyUI saved.
    """

    latent: torch.Tensor
    seconds: float
    others: float
    file: Path


def disturbance(others: dict[int, float], cores: int) -> str:
    """What is to be said where other programs used cores that the ranks needed; empty where they left enough.

    Args:
        others: cores that they used, by the number of ranks that computed meanwhile.
    """
    if all(cores - used >= LEFT_OVER * min(ranks, cores) for ranks, used in others.items()):
        return ""
    beside = " and ".join(f"{used:.2f} beside {ranks} rank{'s' if ranks > 1 else ''}" for ranks, used in others.items())
    return (
        f"Other programs used {beside} of {cores} cores: this is not the ratio of an idle machine. "
        "Run it again when nothing else computes."
    )


def prompt(ranks: int, size: int, steps: int) -> dict[str, Any]:
    """The shipped workflow, with a demo checkpoint, made-up conditioning and SaveLatent in place of the files that are not here."""
    graph: dict[str, Any] = json.loads(WORKFLOW.read_text())
    by_class = {node["class_type"]: name for name, node in graph.items()}
    sampler = graph[by_class["KSampler"]]["inputs"]
    graph[by_class["UNETLoader"]]["inputs"]["unet_name"] = "flux_demo.safetensors"
    graph["cp_config"] = {"class_type": "CPConfig", "inputs": cp_config(world_size=ranks)}
    graph[by_class["ApplyContextParallel"]]["inputs"]["cp_config"] = ["cp_config", 0]
    graph[by_class["EmptySD3LatentImage"]]["inputs"].update(width=size, height=size)
    made_up = {"seed": 100, "tokens": TEXT_TOKENS, "width": 64, "pooled_width": 64, "guidance": 3.5}
    graph["conditioning"] = {"class_type": "TestConditioning", "inputs": {**made_up, "latent": sampler["latent_image"]}}
    sampler.update(steps=steps, seed=1, positive=["conditioning", 0], negative=["conditioning", 0])
    save = {"samples": [by_class["KSampler"], 0], "filename_prefix": f"demo_{ranks}_ranks"}
    graph["save"] = {"class_type": "SaveLatent", "inputs": save}
    del graph[by_class["SaveImage"]]  # what only it needs is not looked at
    return graph


def sample(server: ComfyServer, ranks: int, size: int, steps: int) -> Sampled:
    """Queue the workflow and print its progress."""
    label = "1 rank, ComfyUI's own path" if ranks == 1 else f"{ranks} ranks, context parallel"
    label += f", {(size // 16) ** 2 + TEXT_TOKENS} tokens per step"
    print(f"\n{label}:", flush=True)
    began, load, others = time.monotonic(), None, 0.0
    prompt_id = server.queue(prompt(ranks, size, steps))
    ends = ("progress", "execution_error", "execution_interrupted")
    for number in range(1, steps + 1):
        event = server.wait_event(
            lambda event, number=number: (
                event.type in ends
                and event.data.get("prompt_id") == prompt_id
                and (event.type != "progress" or event.data["value"] >= number)
            ),
            timeout=3600,
        )
        if event.type != "progress":
            break
        print(f"  step {number} of {steps} after {event.time - began:.1f} s", flush=True)
        load = load or OtherPrograms()
        others = load.cores()
    result = server.wait(prompt_id, 60).check()
    seconds = server.step_seconds(result)
    file = server.base / "output" / result.outputs["save"]["latents"][0]["filename"]
    return Sampled(server.latent(result), sum(seconds) / len(seconds), others, file)


def draw(server: ComfyServer, ranks: int, out: Path) -> torch.Tensor:
    """Draw a page of digits; show its first rows, and what can be read. Returns the latent."""
    cp = None if ranks == 1 else {"world_size": ranks}
    latent = server.sample(graphs.pages(DIGITS, cp=cp), 600)
    (picture,) = page.from_latent(latent)
    Image.fromarray((picture * 255).byte().numpy()).save(out / f"digits_{ranks}_ranks.png")
    read = reader.read(page.digits(picture[None]))[0]
    right = int((read == page.classes(DIGITS)[:, None]).sum())
    print(f"\nthe page from {ranks} rank{'s' if ranks > 1 else ''}, {right} of {read.numel()} digits legible; its first rows:")
    print(text_of(picture[: SHOWN * page.PIXELS]), flush=True)
    return latent


def text_of(picture: torch.Tensor) -> str:
    """A picture [height, width] as text, a character for 4 × 8 pixels."""
    halves = torch.nn.functional.avg_pool2d(picture[None, None], 4)[0, 0].unflatten(0, (-1, 2)) > 0.4
    return "\n".join("".join(" ▀▄█"[int(upper) + 2 * int(lower)] for upper, lower in zip(*line, strict=True)) for line in halves)


def main() -> None:
    options = common.options(
        __doc__,
        ranks={"default": 2, "help": "ranks to compare with one"},
        steps={"default": 4, "help": "sampling steps, at least 2"},
        size={"default": 1024, "help": "side of the picture in pixels; 1024 is 4096 tokens"},
        out={"type": Path, "help": "where latents and the server's log go; a new folder by default"},
    )
    comfyui = common.comfyui()
    out = options.out or Path(tempfile.mkdtemp(prefix="context-parallel-demo-"))
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    common.show("demo", **common.machine(), threads_per_rank=1)
    print("writing a checkpoint: Flux architecture, hidden 1024, 2 double and 4 single blocks, random weights", flush=True)
    with common.models() as models:
        checkpoints.write_flux("flux_demo", models, hidden=1024, double_blocks=2, single_blocks=4)
        print("starting ComfyUI", flush=True)
        arguments = ["--use-pytorch-cross-attention"]
        graphs.put_weights(models)
        nodes = CUSTOM_NODES | graphs.NODES
        with ComfyServer(comfyui, models=models, custom_nodes=nodes, args=arguments, env={"OMP_NUM_THREADS": "1"}) as server:
            print(f"drawing a page of digits, prompt {DIGITS}", flush=True)
            alone, together = (draw(server, ranks, out) for ranks in (1, options.ranks))
            print(f"max |difference| of the two pages: {(alone - together).abs().max():.1e} (standard deviation {alone.std():.2f})")
            one, many = (sample(server, ranks, options.size, options.steps) for ranks in (1, options.ranks))
            for run in (one, many):
                (out / run.file.name).write_bytes(run.file.read_bytes())
            (out / "server.log").write_text(server.log_text())
    print(f"\n1 rank:  {one.seconds:.2f} s per step\n{options.ranks} ranks: {many.seconds:.2f} s per step")
    print(f"ratio: {one.seconds / many.seconds:.2f} ({options.ranks} times the cores)")
    if said := disturbance({1: one.others, options.ranks: many.others}, len(os.sched_getaffinity(0))):
        print(said)
    difference = (one.latent - many.latent).abs().max()
    print(f"max |difference| of the latents: {difference:.1e} (standard deviation {one.latent.std():.2f})")
    print(f"pages, latents and the server's log: {out}")
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
