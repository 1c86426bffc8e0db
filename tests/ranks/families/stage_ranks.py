"""Rank script: the cases of some families in stages, against the stock forward in one process; rank 0, the last stage, reports.

Arguments: stages, batch degree, patches, and as JSON the cases, (family, name) each. Every case runs four times with the same
inputs: in exact stages, exact with keys and values kept, and twice in patches. What is stale in these is of the same inputs, so
they too must equal the stock forward: whatever goes to the wrong token shows.
"""

import json

import torch
import torch.distributed as dist
from family_stock import distance, models, stock
from sharded_call import staged_call
from support import families
from support.ranks import finish, report, start

from cp_runtime.engine.hooks import InstalledPlan
from cp_runtime.engine.pipeline.pipeline import Pipeline
from cp_runtime.engine.pipeline.stages import Stages, cut, staged_blocks
from cp_runtime.engine.ranks.config import PipelineSettings
from cp_runtime.engine.ranks.mesh import BatchMesh
from cp_runtime.errors import PlanError
from cp_runtime.families import plan_for

rank, world, (stages, batch_degree, patches, wanted) = start()
exact, patched = (PipelineSettings(stages=int(stages), patches=number) for number in (1, int(patches)))
mesh = BatchMesh(dist.group.WORLD)
lane = mesh.stage(exact.stages).pipeline_group
receive = lane.receive


def noted(target, source):
    asked.add(pipeline.stages.place)
    return receive(target, source)


lane.receive = noted
with torch.no_grad():
    for family, name in json.loads(wanted):
        case = families.case(family, name)
        model, inputs, (expected, _) = models(family)[case.model], case.make(), stock(family, name)
        plan, refused, found, parts, asked = InstalledPlan(model, plan_for(model)), "", {}, 0, set()
        try:
            blocks = staged_blocks(model, plan.plan)
            owners = cut([block.nbytes for block in blocks], exact.stages)
            pipeline = Pipeline(Stages(blocks, owners, lane), mesh.whole)
            runs = {"exact": exact, "filling": patched, "patches": patched, "again": patched}
            for what, settings in runs.items() if plan.plan.shares_sequence else [("exact", exact)]:
                asked = set()
                out = staged_call(plan, pipeline, inputs, case.options, mesh, settings, int(batch_degree))
                found[what] = distance(out, expected)[0]
                parts = parts or pipeline.runs
        except PlanError as error:
            refused = str(error)
        report(
            family=family,
            case=name,
            refused=refused,
            parts=parts,
            pending=mesh.stats.pending,
            asked=sorted(asked),
            forwards=sum("forward" in vars(module) for module in model.modules()),
            **found,
        )
        plan.remove()
finish()
