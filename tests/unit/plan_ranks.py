"""Rank script, one process: checks every plan against a tiny model of its class, and what SenseNova computes before sampling."""

from support import families
from support.models import build
from support.ranks import answer, finish, report, start

from cp_runtime.comfy.ui.interception import LocalTexts, intercept
from cp_runtime.errors import PlanError, UnsupportedError
from cp_runtime.families import plan_for

start()
errors = {}
for family in families.NAMES:
    for name, spec in families.load(family).MODELS.items():
        plan = answer((PlanError, UnsupportedError), plan_for, build(spec))
        errors[f"{family}/{name}"] = plan if isinstance(plan, str) else None
model = build(families.load("sensenova").MODELS["sensenova"])
owner = type("Patcher", (), {"model": model, "object_patches": {}, "object_patches_backup": {}})()  # held weakly
intercept(owner, model)
errors["prepared before sampling"] = [name for name, value in vars(model).items() if isinstance(value, LocalTexts)]
report(**errors)
finish()
