"""Rank script: runs every example of docs/api.md, each with a model and inputs of its own; rank 0 reports the difference."""

import re

import torch
import torch.distributed as dist
from diffusers_cases import flux
from diffusers_models import build, forward, relative
from support.ranks import ROOT, finish, report, start

rank, world, _ = start()

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

torch.compiler.set_stance("force_eager")  # compiled calls are those of api_ranks.py: tracing Flux takes 20 seconds
with torch.inference_mode():
    expected = forward(build("flux"), flux(batch=2))
for code in BLOCK.findall((ROOT / "docs" / "api.md").read_text()):
    names = {"torch": torch, "dist": dist, "model": build("flux"), "inputs": flux(batch=2)}
    exec(compile(code, "docs/api.md", "exec"), names)  # noqa: S102  (what is tested)
    report(code=code, difference=relative((names["out"].sample,), expected))
finish()
