"""Patches of node packs on several ranks, against the same patches on one device: how much of the gain is left on whole tokens.

    COMFYUI_PATH=... python benchmarks/node_packs.py [--ranks 2] [--steps 7] [--size 512]

The Flux of `make demo`, with: no patch; one that a table lists, which gets a rank's tokens; one behind every block, which gets all
tokens; blocks replaced by a node's; and a replaced forward of the transformer, whose blocks run sharded. The caches never skip.
"""

from __future__ import annotations

from statistics import median

import common
from support import checkpoints
from support.graphs import NodeSpec, flux_prompt
from support.server import ComfyServer

SKIPPED = {"double_layers": "0", "single_layers": "", "start_percent": 0.0, "end_percent": 0.0}
PATCHES: dict[str, list[NodeSpec]] = {
    "no patch": [],
    "listed": [("SkipLayerGuidanceDiTSimple", SKIPPED)],
    "behind every block, on all tokens": [("TestOnTokens", {"kind": "mean"})],
    "replaced blocks, on all tokens around them": [("TestOnTokens", {"kind": "replaced_block"})],
    "replaced forward, on all tokens around blocks": [("TestStepCache", {"shape": "never_skips"})],
}
COMPARED = (1, 2, 4)  # calls of a run that are repeated on one device


def seconds(server: ComfyServer, ranks: int, steps: int, size: int, nodes: list[NodeSpec]) -> float:
    """Seconds of a step, the median of those whose call is not repeated."""
    cp = {"world_size": ranks, "ranks_per_call": "all"} if ranks > 1 else None
    prompt = flux_prompt(ckpt="flux_demo", height=size, width=size, tokens=256, steps=steps, guidance=3.5, cp=cp, model_nodes=nodes)
    times = server.step_seconds(server.run(prompt, timeout=3600).check())
    return median(each for step, each in enumerate(times, 2) if step not in COMPARED)


def main() -> None:
    options = common.options(
        __doc__,
        ranks={"default": 2, "help": "ranks to compare with one"},
        steps={"default": 7, "help": "sampling steps, at least 5"},
        size={"default": 512, "help": "side of the picture in pixels"},
    )
    common.show("node packs", **common.machine(), threads_per_rank=1)
    with common.models() as models:
        checkpoints.write_flux("flux_demo", models, hidden=1024, double_blocks=2, single_blocks=4)
        arguments = ["--use-pytorch-cross-attention"]
        with ComfyServer(common.comfyui(), models=models, args=arguments, env={"OMP_NUM_THREADS": "1"}) as server:
            for name, nodes in PATCHES.items():
                one, many = (seconds(server, ranks, options.steps, options.size, nodes) for ranks in (1, options.ranks))
                common.show(name, {"ratio": one / many}, one_device=one, ranks=many)


if __name__ == "__main__":
    main()
