"""ComfyUI with this pack and a tiny random Flux model, to click around in without a GPU: `make play`.

Nothing of it is kept. The nodes "Test …" in its node library stand in for text encoders.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import checkpoints
from support.graphs import flux_prompt
from support.server import ComfyServer

OPEN = """
ComfyUI runs at http://127.0.0.1:{port}/
Drag this file onto its canvas, or open it with Ctrl+O, and press Run:
  {workflow}
The tab "Context Parallel" on the left shows the ranks. The latents are noise: the model's weights are random.
Ctrl-C ends it."""


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="context-parallel-play-") as folder:
        models = Path(folder) / "models"
        checkpoints.write("flux", models)
        workflow = Path(folder) / "tiny_flux.json"
        graph = flux_prompt(node="CPSampler", width=512, height=512, steps=20, cp={})
        graph["report"] = {"class_type": "CPReport", "inputs": {"report": ["sampler", 1]}}
        workflow.write_text(json.dumps(graph))
        arguments = ["--preview-method", "latent2rgb"]
        with ComfyServer(Path(os.environ["COMFYUI_PATH"]), models=models, args=arguments) as server:
            sys.stdout.write(OPEN.format(port=server.port, workflow=workflow) + "\n")
            sys.stdout.flush()
            try:
                signal.pause()
            except KeyboardInterrupt:
                sys.stdout.write("\nending ComfyUI\n")


if __name__ == "__main__":
    main()
