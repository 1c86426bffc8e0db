"""Plans of VAEs, with the facts that torch's functions do not show, and a VAE's call on a part of the rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ...errors import PlanError, UnsupportedError
from ..ranks.collectives import RankGroup
from ..ranks.mesh import SequenceMesh
from ..ranks.sharding import JointLayout
from .exchange import row_layout
from .split import SplitRows

ROWS, COLUMNS = -2, -1


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """How a VAE runs on a part of the rows, with its own forward. See `split`.

    Args:
        family: name shown to users.
        model_class: full name of its class.
        attention: attribute with the attention function of its modules, `(q, k, v)` of `[B, C, ..., rows, columns]`; None = they
            call torch's.
        least: rows of the latent that a rank needs: 2 if padding reflects.
        budget: name of a function, in the VAE class's module, that returns the bytes of activations to compute at once.
        refuses: why a VAE of this class cannot run on a part of the rows, or None.
    """

    family: str
    model_class: str
    attention: str | None = None
    least: int = 1
    budget: str | None = None
    refuses: Callable[[nn.Module], str | None] | None = None

    def check(self, model: nn.Module) -> None:
        """Raise PlanError if the model is another VAE than planned, UnsupportedError if it cannot run on a part of the rows."""
        reason = self.refuses(model) if self.refuses is not None else None
        if reason is not None:
            raise UnsupportedError(reason)
        if self.attention is not None and not attending(model, self.attention):
            raise PlanError(f"{self.family}: no module of {type(model).__name__} has an attribute {self.attention!r}")
        if self.budget is not None and not hasattr(sys.modules[type(model).__module__], self.budget):
            raise PlanError(f"{self.family}: no function {self.budget!r} beside {type(model).__name__}")


def attending(model: nn.Module, attribute: str | None) -> list[nn.Module]:
    """Return the modules with an attention function in the given attribute."""
    return [module for module in model.modules() if attribute in vars(module)]


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by torch's function, which ranks share; q, k and v are `[B, C, ..., rows, columns]`, as in ComfyUI's VAEs."""
    q_BHLD, k_BHLD, v_BHLD = (t.flatten(2).transpose(1, 2).unsqueeze(1) for t in (q, k, v))
    return scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD).squeeze(1).transpose(1, 2).reshape(q.shape)


def split_dim(rows: int, columns: int, world_size: int, least: int = 1) -> int:
    """Return the dimension to split, counted from the end: rows, unless they are too few and there are more columns."""
    return COLUMNS if rows // least < world_size and columns > rows else ROWS


def run_on_rows(
    model: nn.Module,
    plan: RowPlan,
    run: Callable[[Tensor], Tensor],
    whole: Tensor,
    *,
    mesh: SequenceMesh,
    ratio: int = 1,
    first_only: bool = False,
    on_convolution: Callable[[], None] | None = None,
) -> Tensor | None:
    """Run a VAE on all ranks, each on its part of the rows or columns. Every rank must call it alike, without gradients.

    Args:
        model: the VAE.
        run: its `decode` or `encode`.
        whole: its whole input, `[B, C, ..., rows, columns]`.
        ratio: rows of `whole` for each row of the latent: 1 to decode, the VAE's compression to encode.
        first_only: only the first rank gets the result; None on all others.
        on_convolution: called at every convolution.

    Returns:
        The VAE's output for all rows.

    Raises:
        PlanError: the VAE does something that the plan does not cover.
    """
    if mesh.size == 1:
        return run(whole)
    rows, columns = (whole.shape[dim] // ratio for dim in (ROWS, COLUMNS))
    if [rows * ratio, columns * ratio] != list(whole.shape[ROWS:]):
        raise PlanError(f"{tuple(whole.shape)} cannot be split: rows and columns must be multiples of {ratio}")
    dim = split_dim(rows, columns, mesh.size, plan.least)
    layout = row_layout(rows if dim == ROWS else columns, mesh.size, plan.least, mesh.shares)
    start, stop = (ratio * row for row in layout.window(mesh.rank))
    split = SplitRows(layout, mesh, dim, on_convolution)
    with ExitStack() as undo:

        def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)

        for module in attending(model, plan.attention):
            replace(module, str(plan.attention), one_head)
        if plan.budget is not None:
            beside = sys.modules[type(model).__module__]
            replace(beside, plan.budget, _shared_budget(getattr(beside, plan.budget), layout, mesh.whole))
        with split:
            local = run(whole.narrow(dim, start, stop - start))
        return split.gather(local, first_only=first_only)


def _shared_budget(own: Callable[..., int], layout: JointLayout, group: RankGroup) -> Callable[..., int]:
    """Scale a rank's activation budget to its share of the rows, so that all ranks cut tensors into as many parts."""
    held = layout.local_lengths

    def share(*args: Any, **kwargs: Any) -> int:
        budget = torch.tensor([-int(own(*args, **kwargs))], device=group.device)
        least = -int(group.largest(budget).item())
        # A multiple of this rank's rows, as its tensors are, so that the quotient is the same integer on every rank.
        return max(1, least // max(held)) * held[group.rank]

    return share
