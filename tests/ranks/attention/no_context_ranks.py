"""Rank script: CPU ranks on a computer with GPUs (fake ones). Rank 0 reports what ranks asked CUDA that takes memory of a GPU."""

from functools import partial

from support.ranks import finish, of_all, report, start, use_comfyui

rank, world, _ = start(cards=True)
use_comfyui()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

asked = []
OPENS = (
    "_lazy_init", "synchronize", "current_device", "set_device", "device", "get_device_properties", "get_device_capability",
    "get_device_name", "mem_get_info", "memory_stats", "memory_allocated", "current_stream", "default_stream", "Stream", "Event",
    "can_device_access_peer", "cudart",
)  # fmt: skip


def noted(name, answer, *args, **kwargs):
    asked.append(name)
    return answer(*args, **kwargs)


for name in OPENS:
    setattr(torch.cuda, name, partial(noted, name, getattr(torch.cuda, name)))
torch.accelerator.synchronize = partial(noted, "synchronize", torch.accelerator.synchronize)

from family_stock import clone, distance, models, stock  # noqa: E402
from support import families  # noqa: E402

from cp_runtime.comfy.rank.forward import run_sharded  # noqa: E402
from cp_runtime.comfy.rank.memory import room  # noqa: E402
from cp_runtime.comfy.rank.quantised import shared_scales  # noqa: E402
from cp_runtime.comfy.ui.interception import innermost_method  # noqa: E402
from cp_runtime.engine.hooks import InstalledPlan  # noqa: E402
from cp_runtime.engine.measuring import measure  # noqa: E402
from cp_runtime.engine.ranks.config import ContextParallelConfig  # noqa: E402
from cp_runtime.engine.ranks.mesh import BatchMesh  # noqa: E402
from cp_runtime.engine.weights.sharded import ShardedWeights  # noqa: E402
from cp_runtime.families import plan_for  # noqa: E402

CPU = torch.device("cpu")
mesh = BatchMesh(dist.group.WORLD)
measure(mesh.sequence(), CPU)
mesh.sequence(2)
room(CPU)
case = families.load("flux").CASES[0]
model = models("flux")[case.model]
plan, weights = InstalledPlan(model, plan_for(model)), ShardedWeights(model, mesh.sequence().weights, CPU)
with torch.inference_mode(), shared_scales(mesh.whole):
    arguments = {**clone(case.make()), "transformer_options": dict(case.options)}
    config = ContextParallelConfig(ring_degree=2, ulysses_degree=2, ulysses_anything=True, ring_anything=True)
    for name in weights.blocks:
        weights.keep(name)
    forward = getattr(model, innermost_method(model))
    out, _ = run_sharded(plan, forward, arguments, mesh.sequence(), lambda shape: config, weights=weights)
    difference = distance(out, stock("flux", case.name)[0])[0]
report(asked=of_all(asked), difference=difference, kept=len(weights.blocks), tolerance=case.tolerance)
finish()
