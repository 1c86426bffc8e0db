"""Try every node of node packs that changes a model, on ranks against the stock graph, with tiny models: a table in Markdown.

    make packs PACKS_ARGS="~/ComfyUI/custom_nodes/some-pack ..."    (folders of packs; without any, the tests' own ones)

A node is tried with the defaults of its widgets, or with `--set Node.widget=value`, and with an image, mask or conditioning. What
packs need from their requirements.txt must be installed into the environment that `make setup` has made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from support import checkpoints, families, preloaded
from support.graphs import GUIDED_FLUX, Prompt, family_prompt, wan_prompt
from support.latents import TOLERANCE, differ, distance
from support.node_graphs import completed, node
from support.server import CUSTOM_NODES, ComfyServer

FAMILIES = ("sdxl", "qwen")  # with models of `support.models`
GRAPHS: Mapping[str, Callable[..., Prompt]] = {
    "SDXL": partial(family_prompt, families.served()["sdxl"][1], cfg=4.0),
    "Flux": partial(GUIDED_FLUX, width=72, height=104, tokens=13),
    "Wan": partial(wan_prompt, cfg=4.0, width=72, height=56),
    "Qwen-Image": partial(family_prompt, families.served()["qwen"][1], cfg=4.0),
}
GIVEN = {
    "IMAGE": node("EmptyImage", width=64, height=64, batch_size=1, color=0x336699),
    "MASK": node("SolidMask", value=0.5, width=64, height=64),
}
"""Nodes for inputs that have no widget, by type."""
LINKED = {"CONDITIONING": "positive", "LATENT": "latent"}
"""Nodes of the graph for other inputs."""
HEAD = """# Nodes of packs on ranks

Written by `make packs PACKS_ARGS="--write ..."` on {date}, with ComfyUI's own nodes around a tiny random model of each family: two
ranks against the stock graph, seconds for all steps. *On whole tokens*: see [record 47](../adr/0047-patches-that-no-table-lists-run-on-all-tokens.md). *Not for this model*: the stock graph fails.
"""
MOST = 160  # characters of a message
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


def nodes_of(server: ComfyServer, pack: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a pack's nodes from a model to a model, and the other inputs that they require and that have no widget, by type."""
    for name, info in server.object_info().items():
        inputs = {key: kind for key, (kind, *_) in info["input"].get("required", {}).items()}
        models = [key for key, kind in inputs.items() if kind == "MODEL"]
        if info["python_module"].rpartition(".")[2] == pack and len(models) == 1 and "MODEL" in info["output"][:1]:
            yield name, {key: kind for key, kind in inputs.items() if kind not in WIDGETS and not isinstance(kind, list)}


def tried(
    server: ComfyServer, name: str, inputs: Mapping[str, str], widgets: Mapping[str, Any], graph: Callable[..., Prompt], steps: int
) -> str:
    """Return what comes of a node on two ranks, in words."""
    others = {key: GIVEN[kind] for key, kind in inputs.items() if kind in GIVEN}
    wired = {key: [LINKED[kind], 0] for key, kind in inputs.items() if kind in LINKED}
    graph = partial(graph, steps=steps)
    missing = [kind for kind in inputs.values() if kind not in (*GIVEN, *LINKED, "MODEL")]
    if missing:
        return f"not tried: it takes {' and '.join(missing)}"
    links = {key: [key, 0] for key in others}
    settings = {"model_nodes": [(name, {**widgets, **wired, **links})], "others": others}
    plain = server.sample_once(graph())
    stock = server.run(completed(graph(**settings), server), timeout=300)
    if stock.error is not None:
        return f"not for this model: {_short(stock.error.exception_message)}"
    expected = server.latent(stock)
    cp = {"world_size": 2, "ranks_per_call": "all"}
    began = time.monotonic()
    sharded = server.run(completed(graph(cp=cp, node="CPSampler", **settings), server), timeout=300)
    seconds = time.monotonic() - began
    if sharded.error is not None:
        return f"refused: {_short(sharded.error.exception_message)}"
    off = distance(server.latent(sharded), expected)
    if not off <= TOLERANCE:
        return f"**another latent, off by {off:.2g}**"
    ways = [] if differ(expected, plain) else ["no effect here"]
    if sharded.report.get("on_all_tokens"):
        ways.append("on whole tokens")
    return ", ".join(["equal", *ways]) + f" ({seconds:.1f} s)"


def _short(message: str) -> str:
    """Return the first sentence of a message for a cell of a table."""
    first = re.split(r"\.\s|\n", message.strip().removeprefix("Apply Context Parallel: "))[0]
    return first.replace("|", "/")[:MOST]


def widget(text: str) -> tuple[str, str, Any]:
    """Read `Node.widget=value`."""
    path, _, value = text.partition("=")
    name, _, key = path.rpartition(".")
    return name, key, json.loads(value) if re.fullmatch(r"-?[\d.]+|true|false", value) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packs", nargs="*", type=Path, help="folders of node packs")
    parser.add_argument("--set", action="append", type=widget, default=[], help="Node.widget=value", metavar="SETTING")
    parser.add_argument("--steps", type=int, default=4, help="of sampling")
    parser.add_argument("--without", action="append", default=[], help="a node to leave out", metavar="NODE")
    parser.add_argument("--write", action="store_true", help="into docs/generated/node_packs.md")
    given = parser.parse_args()
    packs = {path.resolve().name: path.expanduser() for path in given.packs} or {
        name: path for name, path in CUSTOM_NODES.items() if path.resolve() != ROOT
    }
    with tempfile.TemporaryDirectory(prefix="context-parallel-packs-") as folder:
        models = Path(folder) / "models"
        for name in ("flux", "wan_t2v"):
            checkpoints.write(name, models)
        preloaded.write_models("support.models", models / "diffusion_models", *FAMILIES)
        with ComfyServer(Path(os.environ["COMFYUI_PATH"]), models=models, custom_nodes={**CUSTOM_NODES, **packs}) as server:
            rows = [f"| Pack, node | {' | '.join(GRAPHS)} |", f"|---|{'---|' * len(GRAPHS)}"]
            for pack in packs:
                for name, inputs in [each for each in nodes_of(server, pack) if each[0] not in given.without]:
                    widgets = {key: value for node, key, value in given.set if node == name}
                    results = [tried(server, name, inputs, widgets, graph, given.steps) for graph in GRAPHS.values()]
                    rows.append(f"| {pack}: {name} | {' | '.join(results)} |")
                    sys.stderr.write(f"{rows[-1]}\n")
    table = "\n".join([HEAD.format(date=time.strftime("%Y-%m-%d", time.gmtime())), *rows, ""])
    if given.write:
        (ROOT / "docs" / "generated" / "node_packs.md").write_text(table, encoding="utf-8", newline="\n")
    else:
        sys.stdout.write(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
