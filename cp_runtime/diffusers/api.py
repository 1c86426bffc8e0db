"""Context parallelism for any module, without ComfyUI: reversible, with diffusers' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import MethodType
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn

from ..compat import not_compiled_itself, uncompiled
from ..engine.hooks import InstalledPlan
from ..engine.plan import ShardingPlan
from ..engine.ranks.config import ContextParallelConfig
from ..engine.ranks.mesh import SequenceMesh
from ..engine.weights.sharded import ShardedWeights
from ..errors import ConfigError, PlanError, bad_value, check_switch
from .agreement import check_settings, device_of, in_step
from .calls import ShardedCalls
from .known import is_proven, own_table
from .pipefusion import StagedCalls, staged_table
from .table import plan_from_table
from .vae import SplitVAE, is_vae
from .weights import ShardedModel

Applied = InstalledPlan[ShardingPlan] | SplitVAE


class AppliedPlan:
    """Result of `apply_context_parallel`.

    Attributes:
        mesh: the ranks that share the sequence; `mesh.stats` counts the bytes sent.
        weights: weights of the blocks, if they are sharded: `weights.nbytes` are on this rank's device.
    """

    def __init__(self, installed: Applied | None, mesh: SequenceMesh, weights: ShardedWeights | None) -> None:
        self._installed, self.mesh, self.weights = installed, mesh, weights

    def remove(self) -> None:
        """Undo `apply_context_parallel`. With `shard_weights` all ranks must call it: see `remove_context_parallel`."""
        if self._installed is not None:
            self._installed.remove()


# Weak references: the module's own forward keeps the installed plan alive.
_installed: WeakKeyDictionary[nn.Module, ref[Applied]] = WeakKeyDictionary()


def apply_context_parallel(
    module: nn.Module,
    parallel_config: Any,
    plan: Mapping[str, Any] | ShardingPlan | None = None,
    *,
    shard_weights: bool = False,
    device: torch.device | str | None = None,
    check_inputs: bool = False,
    verify: Literal["first", "never"] | None = None,
) -> AppliedPlan:
    """Split the module's sequence over the ranks, from its next call on.

    Every rank calls it, and then the module, with the same arguments, under `torch.inference_mode()`; every call checks that they
    are the same. Attention is shared where the module calls torch's `scaled_dot_product_attention`. Attention by other means,
    or over less than the split sequence (windows, frames), needs a `ModulePlan`.

    Args:
        module: any module, in eval mode; on this rank's device, unless `device` is given.
        parallel_config: `ContextParallelConfig` or `ParallelConfig`, of this package or of diffusers.
        plan: which arguments are split and which outputs are gathered, as a table in diffusers' form (see `table`) or a
            `ShardingPlan`; None = the module's own `_cp_plan`, or for AutoencoderKL and AutoencoderKLWan the rows of every picture.
        shard_weights: shard the weights of the module's blocks, the elements of its lists of modules: 1/N of the bytes per rank.
            All ranks gather a block while it runs, and prefetch the next one: two exist at a time. Results are the same, bit for
            bit. Every rank must have the same weights before; they may be mapped from a file (`map_weights`), and quantised as
            tensor subclasses with `__tensor_flatten__`, such as torchao's. Until `remove_context_parallel`, reading, saving, moving
            or changing weights of blocks is refused; fuse a LoRA before.
        device: with `shard_weights`, this rank's device: its shards, and everything outside of the blocks, go there. None = that of
            the weights.
        check_inputs: compare all arguments of all ranks before every call, not only before the first one. Other calls compare
            checksums of tensors and weights, once they have run.
        verify: "first" = in the first call every rank also runs the module alone, and compares the outputs; "never" = it does not;
            None = "first" for a plan that is not diffusers' own for the class.

    Returns:
        The applied plan: its `mesh.stats` count the bytes sent, its `remove` undoes it. With degrees 1 x 1 nothing changes, neither
        weights nor device.

    Raises:
        ConfigError: not a config, or one that does not fit the ranks; a device without `shard_weights`.
        PlanError: the plan does not fit the module, or one is applied already; weights that cannot be sharded. A call raises it, on
            all ranks alike, if arguments differ, attention is out of reach, or the output is not gathered.
    """
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise bad_value(
            "module",
            type(module).__name__,
            "a torch.nn.Module of Python code",
            "Pass the part of a pipeline that samples: pipe.transformer.",
        )
    module = uncompiled(module)
    config = ContextParallelConfig.of(parallel_config)
    vae, staged = is_vae(module), config.pipefusion_degree > 1

    def check() -> None:
        check_switch("shard_weights", shard_weights)
        check_switch("check_inputs", check_inputs)
        if verify not in (None, "first", "never"):
            raise bad_value(
                "verify", verify, '"first", "never" or None', "Leave it out, or compare the first call with one process."
            )
        if device is not None and not shard_weights:
            raise bad_value("device", device, "None without shard_weights", "Move the module there before: module.to(device).")
        _check_free(module)
        if vae:
            _check_vae(config, plan=plan, shard_weights=shard_weights or None, verify=verify)
        if staged and shard_weights:
            raise bad_value("shard_weights", shard_weights, "False with pipefusion_degree", "Leave one of them out.")

    if not staged and (config if vae else config.of_all_ranks).mesh_shape == (1, 1):
        check()
        return AppliedPlan(None, SequenceMesh(None), None)
    mesh = _mesh(module, config)
    settings = {"module": type(module).__name__, **config.compared, "plan": plan, "shard_weights": shard_weights}
    settings |= {"check_inputs": check_inputs, "verify": verify}
    made: list[Applied] = []

    def install(ask: Callable[[], None]) -> ShardedCalls | None:
        # Refusals are in here, for `in_step`: a rank that refuses alone would leave the others in the next collective.
        check()
        ask()
        check_settings(settings, mesh.whole)
        if vae:
            made.append(SplitVAE(module, mesh, check_inputs=check_inputs))
            return None
        installed = InstalledPlan(module, _plan_of(module, plan, config))
        made.append(installed)
        verifies = verify == "first" or (verify is None and not staged and not is_proven(module, plan))
        kind = StagedCalls if staged else ShardedCalls
        return kind(installed, config, mesh, check_inputs=check_inputs, verify=verifies)

    try:
        calls = in_step(install, mesh.whole)
        if calls is not None and shard_weights:
            shared = ShardedModel(module, mesh, device)
            calls.weights = shared.weights
            made[0].on_remove(shared.restore)
    except BaseException:
        for each in made:
            each.remove()
        raise
    (applied,) = made
    if calls is None:
        _installed[module] = ref(applied)
        applied.on_remove(partial(_forget, module))
        return AppliedPlan(applied, mesh, None)
    _replace_forward(calls, calls.installed)
    return AppliedPlan(applied, mesh, calls.weights)


def _replace_forward(calls: ShardedCalls, installed: InstalledPlan[ShardingPlan]) -> None:
    """Route the module's calls through the ranks, and refuse copies and saves, until the plan is removed."""
    module = installed.model
    had, stock = vars(module).get("forward"), module.forward

    @not_compiled_itself
    @wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return calls(self, args, kwargs)

    ours = MethodType(forward, module)  # bound, so that a copy of the module can be recognised

    def undo() -> None:
        _installed.pop(module, None)
        vars(module).pop("__reduce_ex__", None)
        if vars(module).get("forward") is not ours:  # wrapped since: the wrapper stays, and ours passes calls on
            return
        if had is None:
            del module.forward
        else:
            module.forward = had

    def refuse_to_save(*_: Any) -> Any:
        raise PlanError(
            f"this {type(module).__name__} is context parallel: a copy, or a file of it, would hold the sharding and not the "
            "model. Save its state_dict(), or call remove_context_parallel before copying or saving it."
        )

    module.forward, calls.forward = ours, forward
    vars(module)["__reduce_ex__"] = refuse_to_save
    _installed[module] = ref(installed)
    installed.on_remove(undo)


def remove_context_parallel(module: nn.Module, plan: Mapping[str, Any] | ShardingPlan | None = None) -> None:
    """Undo `apply_context_parallel`. Does nothing to other modules.

    With `shard_weights` it gathers the weights, bit for bit, as new parameters on their original device: all ranks must call it,
    and each needs room for the whole model there. A weight that was replaced meanwhile stays as it is.

    Args:
        plan: ignored; diffusers' signature has it.
    """
    module = uncompiled(module)
    installed = _installed[module]() if module in _installed else None
    if installed is not None:
        installed.remove()


def _forget(module: nn.Module) -> None:
    _installed.pop(module, None)


def _check_vae(config: ContextParallelConfig, **not_for_vaes: object) -> None:
    for setting, value in not_for_vaes.items():
        if value is not None:
            raise bad_value(setting, value, "nothing for a VAE", "Leave it out.")
    for name in ("batch_degree", "pipefusion_degree"):
        if getattr(config, name) > 1:
            raise bad_value(name, getattr(config, name), "1 for a VAE", "Apply another config to the VAE.")


def _check_free(module: nn.Module) -> None:
    """Raise PlanError if the module is already parallelised."""
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


def _plan_of(module: nn.Module, plan: Mapping[str, Any] | ShardingPlan | None, config: ContextParallelConfig) -> ShardingPlan:
    if isinstance(plan, ShardingPlan):
        return plan
    own = staged_table if config.pipefusion_degree > 1 else own_table
    table = own(module) if plan is None else plan
    if table is None and config.mesh_shape != (1, 1):  # else only the batch is shared, so no sequence is split
        if hasattr(module, "decode"):
            raise PlanError(
                f"{type(module).__name__} looks like a VAE, of which AutoencoderKL and AutoencoderKLWan can be shared. Pass "
                "the transformer only: pipe.transformer."
            )
        raise PlanError(
            f"{type(module).__name__} has no _cp_plan. Pass a plan, or the model inside where this one wraps it, such as "
            "model.module of DistributedDataParallel."
        )
    return plan_from_table(module, table or {})


def _mesh(module: nn.Module, config: ContextParallelConfig) -> SequenceMesh:
    if config.sequence is None:
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised. Start the script with torchrun, and call "
                "torch.distributed.init_process_group first."
            )
        config.setup(dist.get_rank(), dist.get_world_size(), device_of(list(module.parameters())))
    return cast(SequenceMesh, config.sequence)
