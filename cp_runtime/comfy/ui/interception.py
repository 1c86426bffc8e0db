"""Send the transformer's innermost forward, in the UI process, to the workers.

It is the innermost one, so that wrappers which skip or repeat it (step caches, seam smoothing) keep their meaning. It is installed
on the instance when a patcher of ours is loaded, so it does not depend on the arguments of samplers and guiders. It stays until
weights are loaded in this process: unpatched as they are meanwhile, they must not be used here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol
from weakref import ref

import torch
from comfy.cli_args import args as settings
from comfy.model_management import InterruptProcessingException
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ...comfyui import unrecorded
from ...compat import hooks_of
from ...controller.calls import ModelCall
from ...errors import MirrorError, PatchError, PatchInterrupt, PlanError, RankError, UnsentError, UnsupportedError
from ...families import PLANS, class_name
from ...nested import tensors
from ...pool.config import RuntimeConfig
from ..shared.assigned import names_in
from ..shared.forward import CONDITIONINGS, CONTROLNETS
from ..shared.objects import write
from ..shared.patches import applied_patches
from ..shared.reached import functions_of_packs
from ..shared.weights import PREFIX, model_dtype
from .controlnets import DeferredControl
from .fingerprints import code_of_patches
from .injections import injected
from .networks import code_of_networks, identified
from .noted import METHODS, innermost_method, loaded, replaced_in
from .notes import on_ranks
from .obstacles import check_call, compile_of, computes_here, options_for_ranks, unsent
from .options import SENDABLE, plain_options
from .patches import take_whole_batch
from .unlisted import NeedsWholeBatch
from .watching import has_foreign_wrapper

IN_PLACE = ("control",)  # residuals: each rank copies only its part
RAISED = frozenset({"RuntimeError", "ValueError", "TypeError", "IndexError", "KeyError", "AssertionError", "AttributeError"})
"""Of a model's code where a patch has given it something that it cannot take."""
TEXTS = ("preprocess_text_embeds", "preprocess_prefix")


class Owner(Protocol):
    """What is used here of a `patcher.ContextParallelPatcher`."""

    model: Any
    cp_run: Any
    cp_config: RuntimeConfig
    object_patches: dict[str, Any]
    object_patches_backup: dict[str, Any]
    injections: dict[str, Any]

    def refuse_call(self, error: UnsupportedError) -> None: ...

    def call_workers(self, call: ModelCall) -> Any: ...

    def note_steps(self, steps: int) -> None: ...


class Replacement:
    """Replacement for a method of a transformer instance, while the model's weights are on the ranks. `owner`: the patcher as it
    was loaded; held weakly, because the patches of a graph may hold references."""

    sends_to_workers = True

    def __init__(self, owner: Owner, model: nn.Module, method: str, guard: ModuleGuard) -> None:
        self.owner, self.base, self.model, self.method, self.guard = ref(owner), ref(owner.model), model, method, guard
        self.stock: Callable[..., Any] = getattr(type(model), method).__get__(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method. Raises MirrorError if the loaded MODEL is gone, and its patches with it."""
        base, owner = self.base(), self.owner()
        if base is not None and not on_ranks(base):  # ComfyUI has loaded the weights, and their patches, in this process
            return self.stock(*args, **kwargs)
        if owner is None:
            raise MirrorError(
                f"a node called {type(self.model).__name__}.{self.method} of a model that is on the workers, after it had dropped "
                "the MODEL that it was given. Remove that node, or Apply Context Parallel."
            )
        return self.run(owner, args, kwargs)

    def run(self, owner: Owner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class _Injected(Exception):
    """A refused call has loaded the model into this process, with code injected around what is running already."""


class WorkerForward(Replacement):
    """Replacement for the innermost forward: sends its calls to the workers.

    Args:
        instead: a node pack's forward in the place of that method, for the workers.
    """

    def __init__(self, owner: Owner, model: nn.Module, method: str, guard: ModuleGuard, instead: Any = None) -> None:
        super().__init__(owner, model, method, guard)
        self.signature = inspect.signature(self.stock)
        self.instead = {} if instead is None else {method: instead}
        self.stock = instead or self.stock
        self.leading = tuple(self.signature.parameters)[:2]  # the latent and the timestep
        plan = PLANS.get(class_name(model))
        self.rebuilt = [path.split(".") for path in plan.rebuilt] if plan else []

    def run(self, owner: Owner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = self._named(args, kwargs)
        options = arguments.get("transformer_options") or {}
        latent = next(tensors(arguments[self.leading[0]]))  # nested: video, audio
        try:
            # Patches first: what they have noted is no part of the model.
            patches, attention = options_for_ranks(options, owner, owner.cp_config, latent, instead=self.instead)
            check_call(owner, arguments.get("control"), owner.cp_run.watched or has_foreign_wrapper(options))
            compiled = compile_of(owner)
        except UnsupportedError as error:
            owner.refuse_call(error)
            return self.stock(*args, **kwargs)
        control, networks, code = arguments.get("control"), dict(patches.networks), dict(patches.code)
        here: tuple[str, str] | None = None
        run = owner.cp_run.number
        if isinstance(control, DeferredControl) and control.links:
            try:
                code |= code_of_networks((each.network for each in control.links), run)
            except MirrorError as error:
                arguments["control"], here = dict(control), ("unsent", str(error))
            else:
                del arguments["control"]
                # Not a list: texts in one would count as its kind.
                arguments[CONTROLNETS] = tuple(each.encoded(run) for each in control.links)
                networks |= {identified(each.network, run).key: each.network for each in control.links}
        else:
            here = owner.cp_run.controlnets.why_here(control, owner.cp_config.in_stages)
            if isinstance(control, DeferredControl):
                arguments["control"] = dict(control)
        chosen = attention.encoded
        if owner.cp_config.pipeline is not None and options.get("uuids"):
            chosen[CONDITIONINGS] = [f"{run} {name}" for name in options["uuids"]]
            owner.note_steps(len(options.get("sample_sigmas", ())) - 1)
        arguments["transformer_options"] = {**plain_options(options), **chosen, **patches.encoded}
        call = ModelCall(
            method=self.method,
            arguments=arguments,
            leading=self.leading,
            device=latent.device,
            in_place=IN_PLACE,
            mixes_batch=patches.mixes_batch,
            by_conditioning=patches.by_conditioning,
            unlisted=patches.unlisted,
            compares=patches.compares,
            restores=patches.restores,
            all_tokens=attention.all_tokens,
            memory=memory_of_items(owner.model, latent),
            memory_scale=owner.cp_run.memory_scale,
            compile=compiled,
            controlnets=tuple(each["key"] for each in arguments.get(CONTROLNETS, ())),
            controlnets_here=here,
            networks=networks,
            code=code_of_patches(code, patches.sent),
            encode_network=lambda network: write(network).leaves,
        )
        try:
            return owner.call_workers(call)
        except UnsentError as error:
            refused: UnsupportedError = unsent(str(error))
        except UnsupportedError as error:
            refused = error
        except RankError as error:
            if error.kind == PatchInterrupt.__name__:
                raise InterruptProcessingException from error
            by_patch = error.kind in (PatchError.__name__, PlanError.__name__)
            if patches.unlisted is not None and (by_patch or (patches.unlisted.may_need_whole_batch and error.kind in RAISED)):
                refused = patches.unlisted.failed(error.message)
            elif error.kind in (PatchError.__name__, UnsentError.__name__):
                refused = unsent(error.message)
            else:
                raise
        if isinstance(refused, NeedsWholeBatch):
            take_whole_batch(self.model)
            return self.run(owner, args, kwargs)
        owner.refuse_call(refused)
        if any(owner.injections.values()):
            raise _Injected
        return self.stock(*args, **kwargs)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, extra keywords included."""
        bound = dict(self.signature.bind(*args, **kwargs).arguments)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound.update(bound.pop(name, {}))
            elif bound.get(name) is parameter.default and not isinstance(parameter.default, SENDABLE):
                del bound[name]  # an object; the workers have the same default
        for name, key in self.rebuilt:
            if isinstance(bound.get(name), dict):
                bound[name] = {k: v for k, v in bound[name].items() if k != key}
        return bound


def memory_of_items(model: Any, latent: Tensor) -> tuple[float, ...]:
    """Return the bytes that ComfyUI expects a call to take with one item of the latent, with two, and so on."""
    return tuple(float(model.memory_required([items, *latent.shape[1:]])) for items in range(1, latent.shape[0] + 1))


def is_intercepted(model: nn.Module) -> bool:
    return isinstance(vars(model).get(innermost_method(model)), WorkerForward)


def check_forward(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Have a forward that a node has put in place of the transformer's, and that computes with its modules, run on the ranks: see
    `WorkerForward.instead`. Also disable ComfyUI's recording of the intercepted one's calls: it may call more than the replaced
    innermost part.

    This ComfyUI wrapper is around every call. Nodes that replace a forward for a single call, as step caches do, do so outside it.
    """
    model = executor.class_obj.diffusion_model  # type: ignore[attr-defined]
    with instead_of_replaced(model), unrecorded(settings) if is_intercepted(model) else nullcontext():
        try:
            return executor(*args, **kwargs)
        except _Injected:
            return executor(*args, **kwargs)


@contextmanager
def instead_of_replaced(model: nn.Module) -> Iterator[None]:
    """Stand in for a `forward` or `_forward` in the place of the model's own, while active. One that only calls the model's own,
    or none, runs here."""
    guard = next((hook for each in model.children() for hook in hooks_of(each)[0].values() if isinstance(hook, ModuleGuard)), None)
    moved: dict[str, Any] = {}
    if guard is not None and (owner := guard.owner()) is not None:
        replaced = replaced_in(model)
        moved = {name: replaced[name] for name in METHODS if name in replaced and _computes(replaced[name], model)}
        for name, own in moved.items():
            setattr(model, name, WorkerForward(owner, model, name, guard, own))
    try:
        yield
    finally:
        for name, own in moved.items():
            setattr(model, name, own)


def _computes(forward: Any, model: nn.Module) -> bool:
    """Return whether the code of a pack's forward names modules of the model."""
    return any(names_in(function.__code__) & model._modules.keys() for function in functions_of_packs([forward]))


class OnOneDevice:
    """ComfyUI's wrapper that replaces a model's modules by compiled ones, unless the model's calls go to the ranks."""

    def __init__(self, wrapper: Callable[..., Any]) -> None:
        self.wrapper = wrapper

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        if is_intercepted(executor.class_obj.diffusion_model):
            return executor(*args, **kwargs)
        return self.wrapper(executor, *args, **kwargs)


class ModuleGuard:
    """Hook in front of every module below a transformer's root, while the weights are on the ranks: in a sampling run none of these
    modules may compute here, where weights are as in the file, without patches.

    It refuses whatever runs the model past the intercepted forward: a node that replaces the innermost forward for a call, or
    calls blocks or embedders itself.
    """

    sends_to_workers = True

    def __init__(self, owner: Owner) -> None:
        self.owner, self.base = ref(owner), ref(owner.model)
        self.is_lifted = False

    def __call__(self, module: nn.Module, _: Any) -> None:
        base, owner = self.base(), self.owner()
        if self.is_lifted or base is None or not on_ranks(base) or base.current_patcher is None:
            return  # ComfyUI notes the patcher for the time of a run; before, nodes compute with weights as they are in stock
        network = base.diffusion_model
        path = next((path for path, each in network.named_modules() if each is module), type(module).__name__)
        error = computes_here(path, network)
        if owner is None:
            raise MirrorError(str(error))
        owner.refuse_call(error)  # or load the weights: the module goes on with them

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let modules compute, while active: their weights are here."""
        before, self.is_lifted = self.is_lifted, True
        try:
            yield
        finally:
            self.is_lifted = before


class GuardedForward(Replacement):
    """Replacement that refuses a `forward` which may bypass the innermost method and would then run in this process."""

    def run(self, owner: Owner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            options_for_ranks(kwargs.get("transformer_options") or {}, owner, owner.cp_config)
        except UnsupportedError as error:
            owner.refuse_call(error)
        return self.stock(*args, **kwargs)


class LocalTexts(Replacement):
    """Replacement for text processing that some transformers do before sampling, with separate weights: LTX-2, Anima, MiniMax,
    SenseNova.

    It runs in this process, where a model on the workers has no weights but the pages of its file, unpatched and on no device. The
    called modules get their weights for the duration, patched as ComfyUI does at load.
    """

    def run(self, owner: Owner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        text = next(tensors([list(args), kwargs]), None)
        weights = nullcontext() if text is None else weights_at(owner, self.model, text.device)
        with self.guard.lifted(), weights, injected(owner):
            return self.stock(*args, **kwargs)


@contextmanager
def weights_at(patcher: ModelPatcher, model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give called modules of the model their patched weights on a device, while active."""
    paths = {module: path for path, module in model.named_modules() if path}
    patched = applied_patches(patcher)
    kept: list[tuple[dict[str, Any], str, Any]] = []

    def bring(called: nn.Module, _: Any) -> None:
        path = paths.get(called)
        if path is None:
            return  # another model's, or inside a module that was called before
        for inner, module in called.named_modules(prefix=path):
            paths.pop(module, None)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if (dtype := model_dtype(patcher.model, module, name)) != parameter.dtype:
                        put(module._parameters, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
                    key, weight = f"{PREFIX}{inner}.{name}", module._parameters[name]
                    if key in patched and key not in patcher.backup:  # unless it is already patched there
                        weight = patcher.patch_weight_to_device(key, device, return_weight=True)
                    put(module._parameters, name, nn.Parameter(weight.to(device), requires_grad=False))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    put(module._buffers, name, buffer.to(device))

    def put(owner: dict[str, Any], name: str, value: torch.Tensor) -> None:
        kept.append((owner, name, owner[name]))
        owner[name] = value

    hook = register_module_forward_pre_hook(bring)
    try:
        yield
    finally:
        hook.remove()
        for owner, name, value in reversed(kept):
            owner[name] = value


def intercept(owner: Owner, model: nn.Module) -> None:
    innermost, own = innermost_method(model), vars(type(model))
    replacements: dict[str, type[Replacement]] = {innermost: WorkerForward}
    if innermost == "_forward" and "forward" in own and "_forward" not in own:  # may bypass `_forward`
        replacements["forward"] = GuardedForward
    replacements |= {method: LocalTexts for method in TEXTS if hasattr(type(model), method)}
    loaded(model, {name.removeprefix(PREFIX): before for name, before in owner.object_patches_backup.items()})
    guard = ModuleGuard(owner)
    for method, replacement in replacements.items():
        setattr(model, method, replacement(owner, model, method, guard))
    if (instead := owner.object_patches.get(PREFIX + innermost)) is not None:
        setattr(model, innermost, WorkerForward(owner, model, innermost, guard, instead))
    for module in model.modules():
        if module is not model:
            module.register_forward_pre_hook(guard)


def release(model: nn.Module) -> None:
    """Undo `intercept`, before weights are loaded in this process."""
    for method, installed in list(vars(model).items()):
        if isinstance(installed, Replacement):
            delattr(model, method)
    for module in model.modules():
        before, _ = hooks_of(module)
        for number in [number for number, hook in before.items() if isinstance(hook, ModuleGuard)]:
            del before[number]
