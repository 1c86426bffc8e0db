"""Rank script, one process: checks every plan against a tiny model of its class, and a plan against models that were changed.

It reports the errors, and the families in which Torch Compile leaves blocks as they are.
"""

import torch
from support import families
from support.models import build
from support.ranks import finish, report, start

from cp_runtime.engine.compiled import CompiledBlocks, CompileSettings
from cp_runtime.errors import PlanError, UnsupportedError
from cp_runtime.families import plan_for

start()


def error_of(model):
    try:
        plan_for(model)
    except (PlanError, UnsupportedError) as error:
        return str(error)
    return None


def without(name):
    """Error of a Wan model in which a module has another name."""
    model = build(families.load("wan").MODELS["wan t2v"])
    setattr(model, f"{name}_renamed", getattr(model, name))
    delattr(model, name)
    return error_of(model)


errors, left = {}, set()
for family in families.NAMES:
    for name, spec in families.load(family).MODELS.items():
        model = build(spec)
        errors[f"{family}/{name}"] = error_of(model)
        if errors[f"{family}/{name}"] is None and CompiledBlocks(model, plan_for(model), CompileSettings()).left:
            left.add(plan_for(model).family)
errors["blocks that are not compiled"] = sorted(left)
errors["renamed blocks"] = without("blocks")
errors["renamed output"] = without("head")


class Block(torch.nn.Module):
    """A block whose rotary embedding has another name."""

    def __init__(self, block):
        super().__init__()
        self.cross_attn = block.cross_attn

    def forward(self, x, e, rotary, context, **kwargs):
        return x


model = build(families.load("wan").MODELS["wan t2v"])
model.blocks = torch.nn.ModuleList(Block(block) for block in model.blocks)
errors["renamed argument"] = error_of(model)
report(**errors)
finish()
