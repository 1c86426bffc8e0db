"""ComfyUI with this pack and a small model that draws digits, to click around in without a GPU: `make play`.

Nothing of it is kept. Beside ComfyUI's nodes and this pack's there are two that stand for the model's text encoder and VAE. A
larger model with random weights has those as files, the text encoder in its full size.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT), str(ROOT / "benchmarks")]

from digits import graphs
from support import checkpoints, preloaded
from support.architectures import SD3, ClipL
from support.checkpoints import Checkpoint
from support.server import PACK, ComfyServer

from cp_runtime.pool.settings import SETTINGS

SOURCE = "play"
"""A node pack without nodes that brings the templates: the browser opens those of a pack by a link."""

DIGITS = "digits"
"""The template of the model that draws digits."""

LARGER = "larger"
"""The template of a model of which each rank keeps a part: half of the blocks, and two more to compute with."""

OPEN = """
Open this in a browser, and press Run:
  http://127.0.0.1:{port}/?template={digits}&source={source}
or, to see what happens to a model that is larger than one device, each of which keeps a part of it:
  http://127.0.0.1:{port}/?template={larger}&source={source}
The tab "Context Parallel" on the left shows the ranks. The first model draws digits, on one device and on two ranks. The pictures
of the larger one are noise: its weights are random.
Ctrl-C ends it."""


def write_models(folder: Path) -> None:
    graphs.put_weights(folder)
    for name, blocks in (("tiny_sd3", 4), ("larger_sd3", 8)):
        model = SD3(blocks=blocks, context_dim=4096, pooled_dim=2048, grid=64)
        checkpoints.write(name, folder, checkpoint=Checkpoint(architecture=model))
    encoder = Checkpoint(architecture=ClipL(), folder="text_encoders")
    checkpoints.write("tiny_clip_l", folder, dtype=torch.float16, file_stem="tiny_clip_l", checkpoint=encoder)
    preloaded.write_models("support.vaes", folder, "sd3_kl")


def write_templates(pack: Path) -> None:
    templates = pack / "example_workflows"
    templates.mkdir(parents=True)
    (pack / "__init__.py").write_text("NODE_CLASS_MAPPINGS = {}\n")
    for name, make in ((DIGITS, with_all_ranks), (LARGER, with_parts)):
        graph = json.loads((ROOT / ".ci" / f"{name}.json").read_text())
        (templates / f"{name}.json").write_text(json.dumps(make(graph)))


def with_all_ranks(graph: dict[str, Any]) -> dict[str, Any]:
    """The graph with a CP Config that has every rank take part, also where one is as fast."""
    return with_config(graph, [320, 140], ranks_per_call="all")


def with_parts(graph: dict[str, Any]) -> dict[str, Any]:
    """The graph with a CP Config that has each rank keep a part of the model. On GPUs that happens where it does not fit."""
    return with_config(graph, [0, -560], weights="sharded")


def with_config(graph: dict[str, Any], place: list[int], **changes: Any) -> dict[str, Any]:
    """The graph with a CP Config before Apply Context Parallel: its defaults but for `changes`."""
    (apply,) = [node for node in graph["nodes"] if node["type"] == "ApplyContextParallel"]
    (link,) = [slot for slot in apply["inputs"] if slot["name"] == "cp_config"]
    made, ends = graph["last_node_id"] + 1, graph["last_link_id"] + 1
    link["link"] = ends
    config = {
        "id": made, "type": "CPConfig", "pos": place, "size": [270, 200], "flags": {}, "order": 0, "mode": 0, "inputs": [],
        "outputs": [{"name": "cp_config", "type": "CP_CONFIG", "links": [ends]}],
        "properties": {"Node name for S&R": "CPConfig"},
        "widgets_values": [changes.get(name, setting.default) for name, setting in SETTINGS.items()],
    }  # fmt: skip
    graph["nodes"].append(config)
    graph["links"].append([ends, made, 0, apply["id"], apply["inputs"].index(link), "CP_CONFIG"])
    return graph | {"last_node_id": made, "last_link_id": ends}


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="context-parallel-play-") as folder:
        models, pack = Path(folder) / "models", Path(folder) / SOURCE
        write_models(models)
        write_templates(pack)
        server = ComfyServer(
            Path(os.environ["COMFYUI_PATH"]),
            models=models,
            custom_nodes={PACK: ROOT, SOURCE: pack, **graphs.NODES},
            args=["--preview-method", "latent2rgb"],
        )
        with server:
            sys.stdout.write(OPEN.format(port=server.port, source=SOURCE, digits=DIGITS, larger=LARGER) + "\n")
            sys.stdout.flush()
            try:
                signal.pause()
            except KeyboardInterrupt:
                sys.stdout.write("\nending ComfyUI\n")


if __name__ == "__main__":
    main()
