"""Rank script: runs every example of docs/api.md, each with a model and inputs of its own; rank 0 reports the difference."""

import re
import tempfile

import diffusers_pipelines as pipelines
import torch
import torch.distributed as dist
from diffusers_cases import flux
from diffusers_models import build, forward, relative
from support.ranks import ROOT, finish, report, start

rank, world, _ = start()

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

torch.compiler.set_stance("force_eager")  # compiled calls are those of api_ranks.py: tracing Flux takes 20 seconds
pipe, folder = pipelines.load("flux"), tempfile.mkdtemp()
pipe.save_pretrained(folder)
missing = {name: None for name, part in pipe.components.items() if part is None}
with torch.inference_mode():
    expected, of_pipeline = forward(build("flux"), flux(batch=2)), pipelines.run("flux", pipe)
for code in BLOCK.findall((ROOT / "docs" / "api.md").read_text()):
    names = {"torch": torch, "dist": dist, "model": build("flux"), "inputs": flux(batch=2)}
    names |= {"folder": folder, "options": missing, "device": "cpu", "arguments": pipelines.arguments("flux")}
    exec(compile(code, "docs/api.md", "exec"), names)  # noqa: S102  (what is tested)
    found, wanted = (names["images"], of_pipeline) if "images" in names else (names["out"].sample, expected[0])
    report(code=code, difference=relative((found,), (wanted,)))
finish()
