"""Refuses a model that, as the graph built it, cannot run on the workers: UnsupportedError, one sentence with a remedy.

The workers hold the model, its weight patches and stock forwards. Everything else that another node attached to the model exists
only in the UI process, and must be refused: a sharded forward would silently run without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import comfy.controlnet
import comfy.quant_ops
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY, TORCH_COMPILE_KWARGS
from torch import Tensor, nn

from ...engine.compiled import CompileSettings
from ...errors import ON_ONE_DEVICE, MirrorError, PlanError, UnsupportedError
from ...families import PLANS, class_name, most_stages, plan_for, splits_tokens
from ...pool.config import RuntimeConfig
from ...pool.settings import label_of
from ..shared.fingerprint import NOTHING, classes_of
from ..shared.modules import type_name
from ..shared.patches import applied_patches
from ..shared.weights import PREFIX
from .attention import ChosenAttention, attention_of
from .controlnets import DeferredControl
from .fingerprints import OF_MODEL, ModelFingerprint, check_code, check_network
from .injections import ejected
from .noted import REMEDY, note_changes, remedy, replaced_in
from .options import compile_settings
from .packs import running_code
from .patches import PatchSet
from .runtime import multiplies_nvfp4
from .watching import controls_of
from .weight_patches import written_patches

_READING_WEIGHTS = (comfy.controlnet.ControlLora, comfy.controlnet.QwenFunControlNet)


def check_model(patcher: Any, config: RuntimeConfig) -> None:
    """Refuse a ModelPatcher that cannot run on the ranks of a config, before sampling starts."""
    model = patcher.model.diffusion_model
    note_changes(patcher)
    if hasattr(model, "_orig_mod"):
        raise UnsupportedError(f"the model was compiled with torch.compile, which the workers do not repeat. {OF_MODEL}")
    try:
        plan_for(model)
        with ejected(patcher.model):
            check_classes(patcher)
        written_patches(applied_patches(patcher))
    except PlanError as error:
        packs = ", ".join(map(os.path.basename, ModelFingerprint(patcher, classes_of(model)).packs))
        by = f" A node pack replaced code of the model ({packs}). {OF_MODEL}" if packs else ""
        raise UnsupportedError(f"{str(error).rstrip('.')}.{by}") from error
    except MirrorError as error:
        raise UnsupportedError(f"{str(error).rstrip('.')}. {OF_MODEL}") from error
    options_for_ranks(patcher.model_options.get("transformer_options", {}), patcher, config, again=True)
    _check_attached(patcher)
    compile_of(patcher)
    check_experts(model, config.devices)


def check_classes(patcher: Any) -> None:
    """Refuse modules with others inside that are of no class of ComfyUI or torch, where tokens are split: plans know how these
    compute, and another class may mix tokens. Layers of packs are welcome, and so is what a run of another patcher has left, which
    ComfyUI takes out before the next."""
    if not splits_tokens(patcher.model.diffusion_model):
        return
    replaced = replaced_in(patcher.model.diffusion_model)
    left = tuple(f"{name.removeprefix(PREFIX)}." for name in (*patcher.object_patches_backup, *replaced))
    for path, module in patcher.model.diffusion_model.named_modules():
        cls = type(module)
        if f"{path}.".startswith(left):
            continue
        if next(module.children(), None) is not None and not cls.__module__.startswith(("comfy.", "torch.")):
            raise UnsupportedError(
                f"a node replaced the class of {path or 'the transformer'} by {type_name(cls)}, which may "
                f"compute with tokens that a rank does not have. {OF_MODEL}"
            )


def check_experts(model: nn.Module, devices: Iterable[str]) -> None:
    """Refuse experts in NVFP4, where devices multiply it: all ranks would have to run all of them, see `rank.quantised`."""
    if not all(map(multiplies_nvfp4, devices)):
        return
    nvfp4 = comfy.quant_ops.TensorCoreNVFP4Layout
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts" and any(getattr(w, "layout_cls", None) is nvfp4 for w in module.parameters()):
            raise UnsupportedError(
                f"{name} are experts in NVFP4, whose tokens every rank would round with a scale of its own. Load a file in "
                f"another format, or {ON_ONE_DEVICE}."
            )


def check_stages(patcher: Any, config: RuntimeConfig) -> None:
    """Refuse a model that cannot run in the stages or patches of a config."""
    plan, pipeline = PLANS[class_name(patcher.model.diffusion_model)], config.pipeline
    if config.in_stages and plan.unstaged:
        raise UnsupportedError(
            f"{plan.family} cannot be divided into stages: {plan.unstaged}. Set {label_of('weights')} to auto, and remove "
            "CP PipeFusion."
        )
    stages, most = config.staged.stages, most_stages(patcher.model.diffusion_model)
    if config.in_stages and stages > most:
        setting = label_of("world_size") if pipeline is None else "stages of CP PipeFusion"
        raise UnsupportedError(
            f"{plan.family} cannot be divided into {stages} stages: this model has {most} blocks. Set {setting} to at most {most}, "
            f"or {label_of('weights')} to auto without CP PipeFusion."
        )
    if pipeline is not None and pipeline.patches > 1 and not plan.shares_sequence:
        raise UnsupportedError(f"{plan.family} has no tokens that could be divided into patches. Set patches to 1.")


def check_call(patcher: Any, control: Mapping[str, Any] | None, watched: bool) -> None:
    """Refuse a call for the current attachments of the model, or for its ControlNet residuals. It takes some 0.1 ms, unless it is
    `watched`: foreign code takes part in the run, see `watching`."""
    _check_attached(patcher)
    _check_control(patcher.model.diffusion_model, control)
    check_code(patcher.model)
    if watched:
        check_classes(patcher)
        patcher.look_again()


def options_for_ranks(
    options: Mapping[str, Any],
    patcher: Any,
    config: RuntimeConfig,
    latent: Tensor | None = None,
    again: bool = False,
    instead: Mapping[str, Any] = NOTHING,
) -> tuple[PatchSet, ChosenAttention]:
    """Extract the workers' part of `transformer_options`: see `PatchSet.of` and `attention_of`. Refuse the rest."""
    in_patches, model = config.pipeline is not None and config.pipeline.patches > 1, patcher.model.diffusion_model
    try:
        if options.get("ar_state") is not None:
            raise UnsupportedError("autoregressive sampling keeps state inside the transformer.")
        attention, options = attention_of(options, model, config, TORCH_COMPILE_KWARGS in patcher.model_options, again)
        patches = PatchSet.of(options, model, latent, patcher, in_patches, config.in_stages, instead)
    except UnsupportedError as error:
        raise UnsupportedError(error.or_else(remedy(model))) from error
    for network in patches.networks.values() if again else ():
        check_network(network)
    return patches, attention


def compile_of(patcher: Any) -> CompileSettings | None:
    """Return the ranks' settings for `torch.compile`; None if no node asks for it. Refuse unsupported ones."""
    asked = patcher.model_options.get(TORCH_COMPILE_KWARGS)
    try:
        return None if asked is None else compile_settings(asked)
    except UnsupportedError as error:
        raise UnsupportedError(error.or_else(REMEDY)) from error


def conditions_obstacle(conds: Mapping[str, Any]) -> str | None:
    """Return the part of a sampling run's conditions that needs the model's weights in this process, or None."""
    for control in controls_of(conds):
        if isinstance(control, _READING_WEIGHTS):
            return f"a ControlNet ({type(control).__name__}) computes with the model's own weights. {REMEDY}"
    return None


def computes_here(path: str, model: nn.Module) -> UnsupportedError:
    """Build the refusal of a module that is about to compute in this process, where its weights are not."""
    what = f"{path} of {type(model).__name__} past the forward that the workers run"
    return UnsupportedError(f"{running_code()} computes with {what}. {remedy(model)}")


def unsent(what: str) -> UnsupportedError:
    """Build the refusal of a call with a value that ranks need and cannot get."""
    remedy = f"Remove the node that put it there, or {ON_ONE_DEVICE}."
    return UnsupportedError(f"{what.rstrip('.')}. {remedy}")


def _check_control(model: nn.Module, control: Mapping[str, Any] | None) -> None:
    if isinstance(control, DeferredControl) and control.links and PLANS[class_name(model)].control:
        return  # the ranks will know its kinds
    given = {kind for kind, residuals in (control or {}).items() if any(residual is not None for residual in residuals)}
    if not given:
        return
    plan = PLANS[class_name(model)]
    if not plan.shares_sequence or given <= plan.control.keys():
        return
    takes = f"adds those of kind {' and '.join(plan.control)} only" if plan.control else "takes none"
    raise UnsupportedError(
        f"a ControlNet gave residuals of kind {' and '.join(sorted(given))}, and {plan.family} {takes}. "
        "Remove the ControlNet, or load one that was made for this model."
    )


def _check_attached(patcher: Any) -> None:
    for obstacle in _attached(patcher):
        raise UnsupportedError(f"{obstacle} {REMEDY}")


def _attached(patcher: Any) -> Iterator[str]:
    if patcher.get_additional_models_with_key("multigpu"):
        yield "MultiGPU CFG Split made clones of the model; it and context parallelism exclude each other."
    if patcher.get_all_callbacks(CallbacksMP.ON_INJECT_MODEL) or patcher.get_all_callbacks(CallbacksMP.ON_EJECT_MODEL):
        yield "a node has ComfyUI call it when other code is injected into the model, which only the workers do."
    if patcher.weight_wrapper_patches:
        yield f"a node wrapped weights ({next(iter(patcher.weight_wrapper_patches))})."
    if "manual_cast_dtype" in patcher.object_patches:
        yield "a node replaced manual_cast_dtype of the model, which the workers do not repeat."
    for kind, wrappers in patcher.wrappers.items():
        known = {COMPILE_KEY} if kind == WrappersMP.APPLY_MODEL and TORCH_COMPILE_KWARGS in patcher.model_options else set()
        if {key for key, functions in wrappers.items() if functions and str(key).startswith("torch.compile")} - known:
            yield "a node compiles the model in a way of its own, which the workers do not repeat."
