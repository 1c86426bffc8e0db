"""ComfyUI with this pack and a tiny random model, to click around in without a GPU: `make play`.

Nothing of it is kept. All nodes are ComfyUI's and this pack's own: beside the model there is a text encoder in its full size.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from support import checkpoints, preloaded
from support.architectures import SD3, ClipL
from support.checkpoints import Checkpoint
from support.server import PACK, ComfyServer

from cp_runtime.pool.settings import SETTINGS

NAME = "tiny-model"
"""Of the template, and of the node pack without nodes that brings it: the browser opens templates of a pack by a link."""

LARGER = "larger-model"
"""The template of a model of which each rank keeps a part: half of the blocks, and two more to compute with."""

OPEN = """
Open this in a browser, and press Run:
  http://127.0.0.1:{port}/?template={name}&source={name}
or, to see what happens to a model that is larger than one device, each of which keeps a part of it:
  http://127.0.0.1:{port}/?template={larger}&source={name}
The tab "Context Parallel" on the left shows the ranks. The pictures are noise: the model's weights are random.
Ctrl-C ends it."""


def write_models(folder: Path) -> None:
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
    play = ROOT / ".ci" / "play.json"
    shutil.copy(play, templates / f"{NAME}.json")
    (templates / f"{LARGER}.json").write_text(json.dumps(with_parts(json.loads(play.read_text()))))


def with_parts(graph: dict[str, Any]) -> dict[str, Any]:
    """The graph with the larger model, a smaller picture, and a CP Config that has each rank keep a part of the model. On GPUs that
    happens where it does not fit."""
    nodes = {node["type"]: node for node in graph["nodes"]}
    nodes["UNETLoader"]["widgets_values"][0] = "larger_sd3.safetensors"
    nodes["EmptySD3LatentImage"]["widgets_values"] = [256, 256, 1]
    nodes["CPSampler"]["widgets_values"][2] = 8
    apply = nodes["ApplyContextParallel"]
    (link,) = [slot for slot in apply["inputs"] if slot["name"] == "cp_config"]
    made, ends = graph["last_node_id"] + 1, graph["last_link_id"] + 1
    link["link"] = ends
    config = {
        "id": made, "type": "CPConfig", "pos": [0, -560], "size": [300, 480], "flags": {}, "order": 0, "mode": 0, "inputs": [],
        "outputs": [{"name": "cp_config", "type": "CP_CONFIG", "links": [ends]}],
        "properties": {"Node name for S&R": "CPConfig"},
        "widgets_values": ["sharded" if name == "weights" else setting.default for name, setting in SETTINGS.items()],
    }  # fmt: skip
    graph["nodes"].append(config)
    graph["links"].append([ends, made, 0, apply["id"], apply["inputs"].index(link), "CP_CONFIG"])
    return graph | {"last_node_id": made, "last_link_id": ends}


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="context-parallel-play-") as folder:
        models, pack = Path(folder) / "models", Path(folder) / NAME
        write_models(models)
        write_templates(pack)
        server = ComfyServer(
            Path(os.environ["COMFYUI_PATH"]),
            models=models,
            custom_nodes={PACK: ROOT, NAME: pack},
            args=["--preview-method", "latent2rgb"],
        )
        with server:
            sys.stdout.write(OPEN.format(port=server.port, name=NAME, larger=LARGER) + "\n")
            sys.stdout.flush()
            try:
                signal.pause()
            except KeyboardInterrupt:
                sys.stdout.write("\nending ComfyUI\n")


if __name__ == "__main__":
    main()
