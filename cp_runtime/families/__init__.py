"""One plan table per model family. `plan_for` finds the table of a model."""

from __future__ import annotations

import importlib
import pkgutil

from torch import nn

from ..engine.pipeline.stages import staged_blocks
from ..errors import ON_ONE_DEVICE, UnsupportedError
from .family import FamilyPlan

PLANS: dict[str, FamilyPlan] = {
    plan.model_class: plan
    for module in pkgutil.iter_modules(__path__)
    for plan in vars(importlib.import_module(f"{__name__}.{module.name}")).values()
    if isinstance(plan, FamilyPlan)
}


def most_stages(model: nn.Module) -> int:
    """Return the largest number of stages for a model; 0 = it cannot be divided, or has no plan."""
    plan = PLANS.get(class_name(model))
    return 0 if plan is None or plan.unstaged else len(staged_blocks(model, plan))


def splits_tokens(network: nn.Module) -> bool:
    """Return whether ranks may share the tokens of a network, and not only its batch."""
    plan = PLANS.get(class_name(network))
    return plan is None or plan.shares_sequence


def class_name(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def plan_for(model: nn.Module) -> FamilyPlan:
    """Return a diffusion model's checked plan. Raises UnsupportedError if its class has none, PlanError if it is another's."""
    plan = PLANS.get(class_name(model))
    if plan is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no context parallel plan; docs/generated/families.md lists the classes that have one. "
            f"Connect the model to the sampler directly, or {ON_ONE_DEVICE}."
        )
    plan.check(model)
    return plan
