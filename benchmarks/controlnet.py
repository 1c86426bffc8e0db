"""A ControlNet on several ranks: a Flux step without one, with one that the ranks compute, and with one that ComfyUI's process
computes, on one device and on several; and the bytes that a call sends to every rank.

    COMFYUI_PATH=... python benchmarks/controlnet.py [--ranks 2] [--steps 5] [--size 512]

A Flux of three blocks of each kind, and a ControlNet of two of its blocks: a third of the model's work. ComfyUI's process computes
it where a node reads the residuals.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import common
from support import checkpoints
from support.graphs import NodeSpec, flux_prompt
from support.node_graphs import NEGATIVE, POSITIVE, GraphCase, completed, node, picture
from support.server import ComfyServer

CASES: dict[str, tuple[bool, list[NodeSpec]]] = {
    "without a ControlNet": (False, []),
    "with a ControlNet": (True, []),
    "with a ControlNet on one device": (True, [("TestScaledControl", {})]),
}
"""Whether there is one, and nodes behind the loader."""


def measured(
    server: ComfyServer, ranks: int, steps: int, size: int, with_control: bool, model_nodes: list[NodeSpec]
) -> tuple[float, int]:
    """Seconds of a step, the median of those behind the first, and bytes that a call sends to every rank."""
    cp = {"world_size": ranks, "ranks_per_call": "all"} if ranks > 1 else None
    settings = {"ckpt": "flux_bench", "height": size, "width": size, "tokens": 64, "guidance": 3.5, "node": "CPSampler"}
    graph = partial(flux_prompt, **settings, steps=steps, model_nodes=model_nodes)
    nodes = {
        "control_net": node("TestControlNet", model=["loader", 0], kind="flux image", blocks=2),
        "hint": picture(size, size, seed=5),
        "applied": node("ControlNetApplyAdvanced", positive=POSITIVE, negative=NEGATIVE, image=["hint", 0], strength=0.5),
    }
    case = GraphCase(graph, nodes, {"positive": ["applied", 0]}) if with_control else GraphCase(graph)
    result = server.run(completed(case.build(cp=cp), server), timeout=3600).check()
    return median(server.step_seconds(result)), result.report["communication"]["sent_to_ranks"] if ranks > 1 else 0


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
            for name, case in CASES.items():
                (one, _), (many, sent) = (measured(server, each, options.steps, options.size, *case) for each in (1, options.ranks))
                common.show(name, {"ratio": one / many}, one_device=one, ranks=many, MB_per_call=sent / 1e6)


if __name__ == "__main__":
    main()
