"""Rank script, one process: traces cases of the families named, or tables with a mistake in them; reports what -> findings.

Arguments: names of families, or "mistakes".
"""

import functools

import torch
from mistakes import MISTAKES
from support import families
from support.models import build
from support.ranks import finish, report, start
from support.tracer import trace

from cp_runtime.engine.plan import method_of
from cp_runtime.families import plan_for

_, _, wanted = start()


@functools.cache
def model_of(family, name):
    """A model. The tracer takes its plan off again."""
    return build(families.load(family).MODELS[name])


def traced(family, case, change=lambda plan: plan):
    model = model_of(family, case.model)
    return trace(model, change(plan_for(model)), case.make(), case.options)


def cases(family):
    """Cases whose model has tokens to share."""
    loaded = families.load(family)
    plans = {name: plan_for(model_of(family, name)) for name in loaded.MODELS}
    of_forwards = [name for name, plan in plans.items() if {*map(method_of, plan.modules)} == {"forward"}]
    return [case for case in loaded.CASES if plans[case.model].shares_sequence and case.model in of_forwards]


with torch.inference_mode():
    if wanted == ["mistakes"]:
        changes = {what: (family, families.case(family, name), change) for what, (family, name, change, _) in MISTAKES.items()}
        found = {what: traced(*change) for what, change in changes.items()}
    else:
        found = {f"{family}/{case.name}": traced(family, case) for family in wanted for case in cases(family)}
report(**found)
finish()
