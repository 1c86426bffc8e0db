"""Rank script: the cases of some families in stages, against the stock forward in one process; rank 0, the last stage, reports.

Arguments: stages, batch degree, patches, and as JSON the cases, (family, name) each. Every case runs three times with the same
inputs: in exact stages, exact with keys and values kept, and in patches. What is stale in the third is of the same inputs, so it
too must equal the stock forward: whatever goes to the wrong token shows.
"""

import json

import torch
import torch.distributed as dist
from family_stock import distance, models, stock
from sharded_call import staged_call
from support import families
from support.ranks import finish, report, start

from cp_runtime.engine.config import PipelineSettings
from cp_runtime.engine.hooks import InstalledPlan
from cp_runtime.engine.mesh import BatchMesh
from cp_runtime.engine.pipeline.pipeline import Pipeline
from cp_runtime.engine.pipeline.stages import Stages, cut, staged_blocks
from cp_runtime.errors import PlanError
from cp_runtime.families import plan_for

rank, world, (stages, batch_degree, patches, wanted) = start()
exact, patched = (PipelineSettings(stages=int(stages), patches=number) for number in (1, int(patches)))
mesh = BatchMesh(dist.group.WORLD)
with torch.no_grad():
    for family, name in json.loads(wanted):
        case = families.case(family, name)
        model, inputs, (expected, _) = models(family)[case.model], case.make(), stock(family, name)
        plan, refused, found, parts = InstalledPlan(model, plan_for(model)), "", {}, 0
        try:
            blocks = staged_blocks(model, plan.plan)
            owners = cut([block.nbytes for block in blocks], exact.stages)
            pipeline = Pipeline(Stages(blocks, owners, mesh.stage(exact.stages).lane), mesh.whole)
            runs = {"exact": exact, "filling": patched, "patches": patched}
            for what, settings in runs.items() if plan.plan.shares_sequence else [("exact", exact)]:
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
            forwards=sum("forward" in vars(module) for module in model.modules()),
            **found,
        )
        plan.remove()
finish()
