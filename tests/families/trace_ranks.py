"""Rank script, one process: traces cases of the families that its arguments name; reports what -> findings."""

import torch
from support import families
from support.models import build
from support.ranks import finish, report, start
from support.tracer import trace

from cp_runtime.engine.plan import method_of
from cp_runtime.families import plan_for

_, _, wanted = start()


found = {}
with torch.inference_mode():
    for family in wanted:
        loaded = families.load(family)
        models = {name: build(model) for name, model in loaded.MODELS.items()}
        plans = {name: plan_for(model) for name, model in models.items()}
        for case in loaded.CASES:
            plan = plans[case.model]
            if plan.shares_sequence and {*map(method_of, plan.modules)} == {"forward"}:
                found[f"{family}/{case.name}"] = trace(models[case.model], plan, case.make(), case.options)
report(**found)
finish()
