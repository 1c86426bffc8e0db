"""A ControlNet on several ranks: a Flux step without one and with one, on one device and on several.

    COMFYUI_PATH=... python benchmarks/controlnet.py [--ranks 2] [--steps 5] [--size 512]

A Flux of three blocks of each kind, and a ControlNet of two of its blocks: a third of the model's work.
"""

from __future__ import annotations

from statistics import median

import common
from support import checkpoints
from support.graphs import flux_prompt
from support.node_graphs import NEGATIVE, POSITIVE, completed, node, picture
from support.server import ComfyServer


def seconds(server: ComfyServer, ranks: int, steps: int, size: int, with_control: bool) -> float:
    """Seconds of a step, the median of those behind the first."""
    cp = {"world_size": ranks, "ranks_per_call": "all"} if ranks > 1 else None
    nodes = {}
    if with_control:
        nodes = {
            "control_net": node("TestControlNet", model=["loader", 0], kind="flux image", blocks=2),
            "hint": picture(size, size, seed=5),
            "applied": node("ControlNetApplyAdvanced", positive=POSITIVE, negative=NEGATIVE, image=["hint", 0], strength=0.5),
        }
    prompt = flux_prompt(ckpt="flux_bench", height=size, width=size, tokens=64, steps=steps, guidance=3.5, cp=cp, others=nodes)
    if with_control:
        prompt["sampler"]["inputs"]["positive"] = ["applied", 0]
    return median(server.step_seconds(server.run(completed(prompt, server), timeout=3600).check()))


def main() -> None:
    options = common.options(
        __doc__,
        ranks={"default": 2, "help": "ranks to compare with one"},
        steps={"default": 5, "help": "sampling steps"},
        size={"default": 512, "help": "side of the picture in pixels"},
    )
    common.show("controlnet", **common.machine(), threads_per_rank=1)
    with common.models() as models:
        checkpoints.write_flux("flux_bench", models, hidden=1024, double_blocks=3, single_blocks=3)
        arguments = ["--use-pytorch-cross-attention"]
        with ComfyServer(common.comfyui(), models=models, args=arguments, env={"OMP_NUM_THREADS": "1"}) as server:
            for name, control in (("without a ControlNet", False), ("with a ControlNet", True)):
                one, many = (seconds(server, ranks, options.steps, options.size, control) for ranks in (1, options.ranks))
                common.show(name, {"ratio": one / many}, one_device=one, ranks=many)


if __name__ == "__main__":
    main()
