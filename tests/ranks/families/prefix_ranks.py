"""Rank script: Qwen-Image 2.1 with the cache of its prefix on, over steps of several prompts; rank 0 reports.

Arguments: ring degree, Ulysses degree.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from family_stock import distance, forward
from sharded_call import call, in_mode
from support import families
from support.families.qwen_image21 import qwen, references
from support.models import build
from support.ranks import finish, report, start, worst

from cp_runtime.engine.hooks import InstalledPlan
from cp_runtime.engine.ranks.mesh import BatchMesh
from cp_runtime.families import plan_for

rank, world, (ring, ulysses) = start()
PROMPTS = {
    "short": qwen(text=5),
    "long": qwen(text=9),
    "reference": qwen(text=9, ref_latents=references(1, (4, 3)), image_slots=[4]),
    "other": qwen(text=9, context=families.normal(1, 9, 48, seed=5)),
}
# Both conditionings in every step, then a reference, then another text of the same length, then the first again.
ORDER = [*["long", "short"] * 3, *["reference"] * 2, *["other"] * 2, "long"]


def steps():
    for number, name in enumerate(ORDER):
        time = torch.tensor([1.0 - number / len(ORDER)])
        yield name, {**PROMPTS[name], "x": families.normal(1, 16, 6, 5, seed=number), "timesteps": time}


def made(cached):
    model = build(families.load("qwen_image21").MODELS["qwen 2.1"])
    model.current_patcher = SimpleNamespace(get_free_memory=lambda device: 1 << 40)
    model.reset_prefix_cache(cached)
    return model


mesh, config = BatchMesh(dist.group.WORLD), in_mode(ring, ulysses)
plain, keeping, sharded = made(False), made(True), made(True)
installed = InstalledPlan(sharded, plan_for(sharded))
with torch.no_grad():
    for number, (name, inputs) in enumerate(steps()):
        expected = forward(keeping, inputs, {})
        out, _ = call(installed, inputs, {}, mesh, config)
        report(
            step=f"{number} {name}",
            difference=worst(distance(out, expected)[0]),
            by_cache=distance(forward(plain, inputs, {}), expected)[0],
            kept=keeping.prefix_cache is not None,
            kept_here=sharded.prefix_cache is not None,
        )
finish()
