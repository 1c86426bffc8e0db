"""Context parallelism for any module, without ComfyUI: the functions of diffusers by their names, and reversible."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn

from ..engine.config import ContextParallelConfig
from ..engine.hooks import InstalledPlan
from ..engine.mesh import SequenceMesh
from ..engine.plan import ShardingPlan
from ..errors import ConfigError, PlanError
from .table import plan_from_table
from .torch_function import SharedAttention


class AppliedPlan:
    """What `apply_context_parallel` returns.

    Attributes:
        mesh: the ranks that share the sequence; `mesh.stats` counts what is sent.
    """

    def __init__(self, installed: InstalledPlan[ShardingPlan], mesh: SequenceMesh) -> None:
        self._installed, self.mesh = installed, mesh

    def remove(self) -> None:
        """Undo `apply_context_parallel`."""
        self._installed.remove()


# What holds an installed plan is the module itself, by its forward.
_installed: WeakKeyDictionary[nn.Module, ref[InstalledPlan[ShardingPlan]]] = WeakKeyDictionary()


def apply_context_parallel(
    module: nn.Module, parallel_config: Any, plan: Mapping[str, Any] | ShardingPlan | None = None
) -> AppliedPlan | None:
    """Split the module's sequence over the ranks, from its next call on.

    Every rank calls it, and then the module, alike: with the same arguments, under `torch.inference_mode()`. Attention is
    reached where the module calls torch's `scaled_dot_product_attention`; none of it may take another way, or run over less than
    the split sequence (windows, frames), unless the plan says so with a `ModulePlan`.

    Args:
        module: any module, on this rank's device, in eval mode.
        parallel_config: `ContextParallelConfig` or `ParallelConfig`, of this package or of diffusers.
        plan: which arguments are split and which outputs are gathered, as a table in diffusers' form (see `table`) or a
            `ShardingPlan`; None = the module's own `_cp_plan`.

    Returns:
        The applied plan: its `mesh.stats` count what is sent, its `remove` undoes it. None where the degrees are 1 x 1: nothing
        changes then.

    Raises:
        ConfigError: the config is none, or does not fit the ranks.
        PlanError: the plan does not fit the module, or one is applied already.
    """
    config = ContextParallelConfig.of(parallel_config)
    if module in _installed:
        raise PlanError(
            f"context parallelism is applied to this {type(module).__name__} already. Call remove_context_parallel before."
        )
    if any(inner in _installed for inner in module.modules()) or any(module in {*outer.modules()} for outer in _installed):
        raise PlanError(
            f"a part of this {type(module).__name__}, or what it is part of, is context parallel already. Remove it there."
        )
    if any(getattr(getattr(m, "processor", None), "_parallel_config", None) is not None for m in module.modules()):
        raise PlanError(
            f"diffusers' own parallelism is enabled on this {type(module).__name__}. "
            "Load the model again, and do not call enable_parallelism."
        )
    if plan is None:
        plan = getattr(module, "_cp_plan", None)
        if plan is None:
            raise PlanError(f"{type(module).__name__} has no _cp_plan. Pass a plan.")
    if config.mesh_shape == (1, 1):
        return None
    mesh = _mesh(module, config)
    installed = InstalledPlan(module, plan if isinstance(plan, ShardingPlan) else plan_from_table(module, plan))
    had, stock = vars(module).get("forward"), module.forward

    @wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _check_call(self, module)
        with installed.call(mesh, lambda shape: config) as call, SharedAttention(call):
            return installed.forward(stock, *args, **kwargs)

    ours = MethodType(forward, module)  # bound, so that a copy of the module is told from it

    def undo() -> None:
        _installed.pop(module, None)
        if vars(module).get("forward") is not ours:  # somebody has wrapped it since: it stays, and passes on
            return
        if had is None:
            del module.forward
        else:
            module.forward = had

    module.forward = ours
    _installed[module] = ref(installed)
    installed.on_remove(undo)
    return AppliedPlan(installed, mesh)


def remove_context_parallel(module: nn.Module, plan: Mapping[str, Any] | ShardingPlan | None = None) -> None:
    """Undo `apply_context_parallel`. Does nothing to a module that it was not applied to.

    Args:
        plan: taken for diffusers' signature; what was applied is known.
    """
    installed = _installed[module]() if module in _installed else None
    if installed is not None:
        installed.remove()


def _check_call(called: nn.Module, module: nn.Module) -> None:
    name = type(module).__name__
    if called is not module:
        raise PlanError(f"this {name} is a copy of one that is context parallel. Call remove_context_parallel before copying it.")
    if module.training:
        raise PlanError(f"this {name} is in training mode; context parallelism is for inference. Call its eval().")
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
        raise PlanError(f"this {name} would record gradients. Call it under torch.inference_mode() or torch.no_grad().")


def _mesh(module: nn.Module, config: ContextParallelConfig) -> SequenceMesh:
    if config.sequence is None:
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised. Start the script with torchrun, and call "
                "torch.distributed.init_process_group first."
            )
        tensor = next(module.parameters(), None)
        device = torch.device("cpu") if tensor is None else tensor.device
        config.setup(dist.get_rank(), dist.get_world_size(), device)
    if config.sequence is None:
        raise ConfigError("the config was not set up")
    return config.sequence
