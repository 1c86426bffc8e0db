"""Apply context parallelism to a MODEL, and undo it; measure its sampling runs, on one device or on several."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from comfy.patcher_extension import WrappersMP
from comfy.sampler_helpers import cleanup_models, estimate_memory
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY

from ...controller.prompt_times import CONTROLNET
from ...controller.run_stats import RunStats, unit_of
from ...engine.measuring import device_driver
from ...errors import UnsupportedError, bad_value
from ...pool.config import RuntimeConfig
from .controlnets import ControlNets, form_of
from .interception import check_forward
from .names import kind_of
from .obstacles import check_model, check_stages, conditions_obstacle
from .patcher import RUNS, ContextParallelPatcher, Run, executing_node, plain_class, raise_or_warn
from .residency import patcher_over
from .runtime import CONTROLLER, default_config, nothing_to_share, title_of
from .server import in_own_language
from .watching import has_foreign_control, takes_foreign_part

log = logging.getLogger("context_parallel")

_sampling: list[ExitStack] = []
"""What is to be undone after the running samplings, the innermost last."""
WRAPPER, TIMER = "context_parallel", "context_parallel_timer"


def check_type(model: Any) -> None:
    """Raise ConfigError for anything but a MODEL: ComfyUI accepts any JSON in place of a link."""
    if not isinstance(model, comfy.model_patcher.ModelPatcher):
        raise bad_value("model", model, "a MODEL", "Connect Load Diffusion Model or Load Checkpoint.")


def apply_to_model(model: Any, config: RuntimeConfig | None = None) -> Any:
    """Return a MODEL that computes on `config`'s ranks, or on all devices without one; for one device if only that takes part.

    Raises:
        ConfigError: an argument is of another type.
        UnsupportedError: the model cannot run sharded and on_unsupported is "error".
    """
    check_type(model)
    config = default_config() if config is None else config
    if not isinstance(config, RuntimeConfig):  # ComfyUI accepts any JSON in place of a link
        raise bad_value("cp_config", config, "the output of a CP Config node, or nothing", "Connect one, or none for all devices.")
    if overrules(model, config):
        log.warning("the model comes from an Apply Context Parallel with other settings: those of the last node count")
    alone = nothing_to_share()
    if alone is not None and (config.world_size == 1 or alone.is_final):
        log.warning("the model passes through: %s", alone.words)
        CONTROLLER.journal.pass_through(executing_node())
        if alone.is_final:
            return model
    if config.world_size == 1:
        log.info("context parallelism over one device: the model passes through")
        return timed(without_context_parallel(model).clone())
    try:
        check_model(model, config)
        check_stages(model, config)
    except UnsupportedError as error:
        raise_or_warn(error, config, "the model passes through on a single device", raised_by="Apply Context Parallel")
        return timed(without_context_parallel(model).clone())
    patcher = ContextParallelPatcher.over(model, config)
    for wrapper in patcher.wrappers.get(WrappersMP.APPLY_MODEL, {}).pop(COMPILE_KEY, []):
        patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY, wrapper)
    wrappers = {
        WrappersMP.PREPARE_SAMPLING: prepare_sampling,
        WrappersMP.OUTER_SAMPLE: cleaned_up,
        WrappersMP.APPLY_MODEL: check_forward,
    }
    _wrap(patcher, WRAPPER, wrappers)
    return timed(patcher)


def overrules(model: Any, config: RuntimeConfig | None) -> bool:
    """Return whether a config takes the place of another one, of an Apply Context Parallel before."""
    return isinstance(model, ContextParallelPatcher) and model.cp_config != (config or default_config())


def without_context_parallel(model: Any) -> Any:
    """Return the model as it was before `apply_to_model`."""
    if not isinstance(model, ContextParallelPatcher):
        return model
    plain = model.clone()
    plain.__class__ = plain_class(type(plain))
    _wrap(plain, WRAPPER, {})
    _wrap(plain, TIMER, {})
    return patcher_over(plain)


def _wrap(patcher: Any, key: str, wrappers: Mapping[str, Callable[..., Any]]) -> None:
    """Replace the patcher's wrappers under a key by these, by kind."""
    for kind in list(patcher.wrappers):
        patcher.remove_wrappers_with_key(kind, key)
    for kind, wrapper in wrappers.items():
        patcher.add_wrapper_with_key(kind, key, wrapper)


def prepare_sampling(executor: Callable[..., Any], model: Any, noise_shape: Any, conds: dict[str, Any], **kwargs: Any) -> Any:
    """Check the conditions before the model is loaded, when it can still be loaded in this process instead."""
    if isinstance(model, ContextParallelPatcher):
        watched = model.cp_run.watched or has_foreign_control(conds)
        obstacle = conditions_obstacle(conds)
        controlnets = ControlNets.of(conds)
        told = controlnets._replace(on_ranks=())  # the run would keep them in memory until the next one
        model.cp_run = Run(next(RUNS), obstacle, *call_memory(model, noise_shape, conds), watched, told)
        if obstacle is None and not model.cp_config.in_stages and _sampling:
            _sampling[-1].enter_context(controlnets.deferred())
    return executor(model, noise_shape, conds, **kwargs)


@in_own_language
def cleaned_up(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a sampling, and note whether foreign code takes part. Where it fails, clean up its ControlNets and additional models,
    which ComfyUI does after a success only: some change the model until then. Our errors come where a stock run has none:
    refusals, ranks that died, their memory.
    """
    guider = executor.class_obj  # type: ignore[attr-defined]
    if isinstance(guider.model_patcher, ContextParallelPatcher):
        guider.model_patcher.cp_run = Run(watched=takes_foreign_part(guider, args[2] if len(args) > 2 else kwargs["sampler"]))
    _sampling.append(ExitStack())
    try:
        return executor(*args, **kwargs)
    except BaseException:
        if (loaded := vars(guider).pop("loaded_models", None)) is not None:  # else it failed before any was used
            try:
                cleanup_models(guider.conds, loaded)
            except Exception:
                log.exception("a ControlNet or an additional model could not be cleaned up after an error")
        raise
    finally:
        _sampling.pop().close()


def call_memory(model: Any, noise_shape: Any, conds: dict[str, Any]) -> tuple[float, float]:
    """Return the bytes that ComfyUI expects a call to take, and their ratio to those for the latent alone."""
    alone = model.memory_required(list(noise_shape))
    _, together = estimate_memory(model, noise_shape, conds)
    return together, max(1.0, together / alone) if alone > 0 else 1.0


def timed(patcher: Any) -> Any:
    """Measure a patcher's sampling runs for the journal, also those on one device, for comparison. Return the patcher."""
    device = patcher.cp_config.devices[0] if isinstance(patcher, ContextParallelPatcher) else str(patcher.load_device)
    unit = unit_of(torch.device(device).type)
    timer, in_calls = RunStats(None), 0.0

    def prepare(executor: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal timer
        machine = f"{title_of(device)}, {device_driver()}"
        timer = RunStats(kind_of(model), machine, unit)
        # Where a model passes through, the text that says so is the node's that shares out.
        CONTROLLER.journal.begin_run(timer, executing_node() if nothing_to_share() is None else None)
        return executor(model, *args, **kwargs)

    def sample(
        executor: Callable[..., Any], noise: Any, latent: Any, sampler: Any, sigmas: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        out = executor(noise, latent, sampler, sigmas, *args, **kwargs)
        if CONTROLLER.journal.run is timer:
            if timer.result.last is None:  # ranks are done when they return
                comfy.model_management.synchronize()
            CONTROLLER.journal.end_run(len(sigmas) - 1)
        return out

    def call(
        executor: Callable[..., Any], x: Any, t: Any, c_concat: Any = None, c_crossattn: Any = None, control: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        nonlocal in_calls
        timer.enter({"x": x, "concat": c_concat, "control": form_of(control), **kwargs})
        began = time.monotonic()
        out = executor(x, t, c_concat, c_crossattn, control, *args, **kwargs)
        in_calls += time.monotonic() - began
        timer.leave()
        return out

    def beside_calls(executor: Callable[..., Any], model: Any, conds: Any, *args: Any, **kwargs: Any) -> Any:
        """Count what ComfyUI's process computes for ControlNets. Without ranks its device still computes when this returns."""
        before, began = in_calls, time.monotonic()
        out = executor(model, conds, *args, **kwargs)
        if any("control" in cond for some in conds for cond in some or ()):
            CONTROLLER.journal.prompt.take(CONTROLNET, time.monotonic() - began - (in_calls - before))
        return out

    wrappers: dict[str, Callable[..., Any]] = {
        WrappersMP.PREPARE_SAMPLING: prepare,
        WrappersMP.OUTER_SAMPLE: sample,
        WrappersMP.APPLY_MODEL: call,
    }
    if isinstance(patcher, ContextParallelPatcher):
        wrappers[WrappersMP.CALC_COND_BATCH] = beside_calls
    _wrap(patcher, TIMER, wrappers)
    return patcher
