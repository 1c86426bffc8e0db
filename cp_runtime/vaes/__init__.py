"""Plans of VAEs, one per class: data, as in `families`. `row_plan_for` finds a VAE's plan."""

from __future__ import annotations

from torch import nn

from ..engine.rows.plan import RowPlan
from ..errors import UnsupportedError
from .tables import TABLES

ROW_PLANS: dict[str, RowPlan] = {plan.model_class: plan for plan in TABLES}


def row_plan_for(model: nn.Module) -> RowPlan:
    """Return the checked plan of a VAE.

    Raises:
        UnsupportedError: none was written for its class, or it cannot run on a part of the rows.
        PlanError: it is not the VAE that the plan was written for.
    """
    plan = ROW_PLANS.get(f"{type(model).__module__}.{type(model).__qualname__}")
    if plan is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no plan for mode exact; docs/generated/families.md lists the VAEs that have one. "
            "Set mode to tiles."
        )
    plan.check(model)
    return plan
