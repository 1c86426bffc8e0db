"""ComfyUI with this pack and a tiny random model, to click around in without a GPU: `make play`.

Nothing of it is kept. All nodes are ComfyUI's and this pack's own: beside the model there is a text encoder in its full size.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import checkpoints, preloaded
from support.architectures import SD3, ClipL
from support.checkpoints import Checkpoint
from support.server import PACK, ComfyServer

NAME = "tiny-model"
"""Of the template, and of the node pack without nodes that brings it: the browser opens templates of a pack by a link."""

OPEN = """
Open this in a browser, and press Run:
  http://127.0.0.1:{port}/?template={name}&source={name}
The tab "Context Parallel" on the left shows the ranks. The pictures are noise: the model's weights are random.
Ctrl-C ends it."""


def write_models(folder: Path) -> None:
    model = SD3(blocks=4, context_dim=4096, pooled_dim=2048, grid=64)
    checkpoints.write("tiny_sd3", folder, checkpoint=Checkpoint(architecture=model))
    encoder = Checkpoint(architecture=ClipL(), folder="text_encoders")
    checkpoints.write("tiny_clip_l", folder, dtype=torch.float16, file_stem="tiny_clip_l", checkpoint=encoder)
    env = {**os.environ, "PYTHONPATH": os.environ["COMFYUI_PATH"]}
    made = preloaded.run(["-m", "support.vaes", str(folder), "sd3_kl"], cwd=ROOT / "tests", env=env)
    if made.returncode:
        sys.exit(made.stderr)


def write_template(pack: Path) -> None:
    (pack / "example_workflows").mkdir(parents=True)
    (pack / "__init__.py").write_text("NODE_CLASS_MAPPINGS = {}\n")
    shutil.copy(ROOT / ".ci" / "play.json", pack / "example_workflows" / f"{NAME}.json")


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="context-parallel-play-") as folder:
        models, pack = Path(folder) / "models", Path(folder) / NAME
        write_models(models)
        write_template(pack)
        server = ComfyServer(
            Path(os.environ["COMFYUI_PATH"]),
            models=models,
            custom_nodes={PACK: ROOT, NAME: pack},
            args=["--preview-method", "latent2rgb"],
        )
        with server:
            sys.stdout.write(OPEN.format(port=server.port, name=NAME) + "\n")
            sys.stdout.flush()
            try:
                signal.pause()
            except KeyboardInterrupt:
                sys.stdout.write("\nending ComfyUI\n")


if __name__ == "__main__":
    main()
