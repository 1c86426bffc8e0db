"""Rank script: cases of families on fake CUDA devices (`support/stand_in`), one per rank, with a stand-in for NCCL.

The sharded forward against the stock forward on the CPU. Rank 0 reports both, what of this project made a host wait for its
card, and where ranks differed in what they launched. Arguments: ring degree, Ulysses degree, rotate method, stages (0: sharded,
else every case in exact stages and three times in patches), and as JSON the cases, (family, name) each.
"""

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial

from support.ranks import finish, of_all, report, start, use_comfyui

rank, world, (ring, ulysses, rotate_method, stages, wanted) = start(cards=True)
wanted = [tuple(case) for case in json.loads(wanted)]
use_comfyui()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from family_stock import clone, distance, models, stock  # noqa: E402
from sharded_call import in_mode, staged_call  # noqa: E402
from support import families  # noqa: E402
from support.stand_in import messages, tensors  # noqa: E402

from cp_runtime.comfy.rank.forward import run_sharded  # noqa: E402
from cp_runtime.comfy.ui.interception import innermost_method  # noqa: E402
from cp_runtime.engine.hooks import InstalledPlan  # noqa: E402
from cp_runtime.engine.pipeline.pipeline import Pipeline  # noqa: E402
from cp_runtime.engine.pipeline.stages import Stages, cut, staged_blocks  # noqa: E402
from cp_runtime.engine.ranks.config import PipelineSettings  # noqa: E402
from cp_runtime.engine.ranks.mesh import BatchMesh  # noqa: E402
from cp_runtime.errors import PlanError  # noqa: E402
from cp_runtime.families import plan_for  # noqa: E402
from cp_runtime.nested import map_tensors  # noqa: E402

mesh, hosts = BatchMesh(dist.group.WORLD), dist.new_group(backend="gloo")
configs = [in_mode(ring, ulysses, rotate_method, rounds) for rounds in (1, 2)]


def on_card(value):
    return map_tensors(value, lambda tensor: tensor.to("cuda", copy=True))


def in_stages(plan, arguments, options):
    """A call in exact stages, and three more in patches, where the model can: the first result."""
    blocks, settings = staged_blocks(plan.model, plan.plan), PipelineSettings(stages=world, patches=1)
    stages = Stages(blocks, cut([block.nbytes for block in blocks], world), mesh.stage(world).pipeline_group)
    pipeline = Pipeline(stages, mesh.whole)
    out = staged_call(plan, pipeline, arguments, options, mesh, settings, batches=2)
    with suppress(PlanError):
        for _ in range(3):
            staged_call(plan, pipeline, arguments, options, mesh, replace(settings, patches=3), batches=2)
    return out


def own_waits():
    """Of all ranks: a line -> how often."""
    found = {place: count for place, count in tensors.waits.items() if ", cp_runtime/" in place}
    return {place: count for each in of_all(found, hosts) for place, count in each.items()}


def disagreement():
    """Of the ranks, about what was launched for a case."""
    everybody = of_all(messages.log, hosts)
    messages.log.clear()
    return messages.disagreement(everybody)


with torch.no_grad():
    for index, (family, name) in enumerate(wanted):
        planner = partial(lambda config, shape: config, configs[index % 2])
        case = families.case(family, name)
        expected, _ = stock(family, name)
        model, inputs = models(family)[case.model].to("cuda"), clone(case.make())
        control = inputs.pop("control", None)  # ranks get residuals in the memory that they share with the controller
        arguments = on_card({**inputs, "transformer_options": dict(case.options)})
        if control is not None:
            arguments["control"] = control
        plan = InstalledPlan(model, plan_for(model))
        tensors.waits.clear()
        if int(stages):
            out = in_stages(plan, arguments, arguments.pop("transformer_options"))
        else:
            out, _ = run_sharded(plan, getattr(model, innermost_method(model)), arguments, mesh.sequence(), planner)
        waits = own_waits()
        plan.remove()
        on_host = map_tensors(out, torch.Tensor.cpu)
        difference = distance(on_host, expected)[0]
        report(family=family, case=name, difference=difference, device=str(out[0].device), waits=waits, order=disagreement())
finish()
