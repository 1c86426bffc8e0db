"""Run the calls of a context-parallel module."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ..compat import attention_backend_of, not_compiled, not_compiled_itself, one_graph_is_asked_for
from ..engine.attention.opaque import serving
from ..engine.hooks import InstalledPlan
from ..engine.plan import ShardingPlan, argument_names
from ..engine.ranks.config import ContextParallelConfig
from ..engine.ranks.mesh import BatchMesh, SequenceMesh
from ..engine.weights.sharded import ShardedWeights
from ..errors import PlanError, bad_value
from ..nested import form_of
from . import agreement
from .batches import BatchSlice
from .checksums import Checksums
from .known import item_dims, known
from .torch_function import shared_attention

TRAINING = "For training take diffusers' own enable_parallelism, or torchtitan."
KEPT = ("kv_cache", "kv_caches")  # arguments of diffusers' classes: what is attended to again in later calls
FORMS = 64  # forms of calls to remember: shapes and kinds of arguments


_RUNNING = threading.RLock()


class Turn:
    """One call over the ranks at a time. Raises PlanError: another thread runs one, in whose messages this one's would come."""

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__

    @not_compiled
    def __enter__(self) -> None:
        if not _RUNNING.acquire(blocking=False):
            raise PlanError(
                f"{self._name} was called while another call over the ranks runs in another thread: ranks compute one call at a "
                "time, in the same order. Call one after the other."
            )

    @not_compiled
    def __exit__(self, *_: object) -> None:
        _RUNNING.release()


class ShardedCalls:
    """Calls of a module's forward over the ranks: see `apply_context_parallel`.

    Args:
        installed: the plan on the module. The module's forward is not replaced yet.
        config: set up for these ranks.

    Attributes:
        weights: weights of the blocks, once they are sharded.
        forward: what replaces the module's.
    """

    def __init__(
        self,
        installed: InstalledPlan[ShardingPlan],
        config: ContextParallelConfig,
        mesh: SequenceMesh,
        *,
        check_inputs: bool,
        verify: bool,
    ) -> None:
        module = installed.model
        self._module, self._stock, self.installed = module, module.forward, installed
        self._config, self._mesh = config, mesh
        self.weights: ShardedWeights | None = None
        self._verify, self._turn = verify, Turn(module)
        self._processors = attending(module)
        self._names, self._dims = argument_names(module), item_dims(module, installed.plan.modules.get(""))
        self._forms: set[object] = set()
        self._attended: object = None  # backends and processors of the last call
        self.forward: Callable[..., Any] | None = None
        self._calls, self._is_running, self._is_removed, self._was_alone = 0, False, False, False
        self._checksums = Checksums(module, mesh.whole, always=check_inputs)
        installed.outside = self._note_alone
        installed.follow()
        installed.on_remove(self._end)

    _in_step = True

    @not_compiled_itself
    def __call__(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call. `called`: the module, or a copy of it, which is refused."""
        if self._is_removed:  # a wrapper that was put around it since still calls it
            return self._stock(*args, **kwargs)
        with self._turn:
            self._is_running = True
            try:
                return self._call(called, args, kwargs)
            finally:
                self._is_running = False

    def _note_alone(self) -> None:
        """Warn, once, that the module runs, and not through the ranks."""
        forward = self._module.forward
        if not self._is_running and not self._was_alone and getattr(forward, "__func__", None) is not self.forward:
            self._was_alone = True
            by = ".".join(getattr(forward, each, type(forward).__qualname__) for each in ("__module__", "__qualname__"))
            warnings.warn(
                f"This {type(self._module).__name__} was called on this rank alone: {by} has replaced its forward since "
                "apply_context_parallel, and does not call what it has replaced. Call apply_context_parallel after it.",
                stacklevel=2,
            )

    def _end(self) -> None:
        self._is_removed = True
        self._checksums.stop()

    @not_compiled_itself
    def _call(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = type(self._module).__name__
        _check_call(called, self._module, self._mesh)
        if one_graph_is_asked_for():
            raise bad_value(
                f"fullgraph for the whole {name}",
                True,
                "False, since tokens are split and gathered between graphs",
                "Compile its blocks: model.compile_repeated_blocks(fullgraph=True).",
            )
        if self.installed.refresh():
            self._processors = attending(self._module)
        error = _call_error(self._module, kwargs)
        posted = self._checksums.begin(self._stock, args, kwargs, error)
        backends = tuple(attention_backend_of(attention.processor) for attention in self._processors)
        attention = (backends, *(type(attention.processor) for attention in self._processors))
        form = (form_of(args), form_of(kwargs), attention)
        first = form not in self._forms
        # What has attended before may leave it out on purpose, as where a step cache keeps what blocks returned.
        self._is_new = attention != self._attended or not self._processors
        if first and self._in_step:
            out = agreement.in_step(partial(self._first, error, args, kwargs), self._mesh.whole)
        elif error is not None:
            raise error
        else:
            out = self._sharded(args, kwargs)
        # First calls have collectives that others lack. Ranks get the same calls, so they remember and forget the same forms.
        if len(self._forms) == FORMS:
            self._forms.clear()
        self._forms.add(form)
        self._calls, self._attended = self._calls + 1, attention
        self._checksums.end(posted, self._stock, args, kwargs)
        return out

    @not_compiled_itself
    def _first(self, error: PlanError | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], ask: Callable[[], None]) -> Any:
        """Run the first call of a form. `error`: keeps this rank from it."""
        if error is not None:
            raise error
        return (self._verified if self._verify and not self._calls else self._sharded)(args, kwargs, ask)

    @not_compiled_itself
    def _verified(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], ask: Callable[[], None]) -> Any:
        """Run one call, and compare it with one process."""
        # The sharded run draws the same random numbers again. All ranks run the whole module, so they can gather sharded weights.
        devices = [torch.accelerator.current_device_index()] if self._mesh.whole.device.type != "cpu" else []
        with self.weights.call() if self.weights is not None else nullcontext(), torch.random.fork_rng(devices):
            expected = agreement.expected_output(self._stock, args, kwargs)
        ask()
        out = self._sharded(args, kwargs, ask)
        agreement.check_output(type(self._module).__name__, out, expected, self._mesh.whole)
        return out

    @not_compiled_itself
    def _sharded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], ask: Callable[[], None] | None = None) -> Any:
        """Run one call. `ask`: in the first call of a form, see `agreement.in_step`."""
        share, sequence, degrees, args, kwargs = self._slice(self._config.batch, self._mesh, args, kwargs)
        run = partial(self._of_group, sequence, degrees, args, kwargs)
        if share is None:
            return run(ask)
        if ask is None:
            return share.gather(run(None))
        # Groups may attend a different number of times, as with guidance by skipped layers for some items: each asks its own ranks.
        out = agreement.in_step(partial(run, ask_all=ask), sequence.whole)
        ask()
        return share.gather(out)

    @not_compiled_itself
    def _of_group(
        self,
        sequence: SequenceMesh,
        degrees: ContextParallelConfig,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        ask: Callable[[], None] | None,
        ask_all: Callable[[], None] | None = None,
    ) -> Any:
        """Run this group's part of a call. `ask_all`: asks the other groups, too, of which each has a part of the weights."""
        installed, asks = self.installed, [each for each in (ask, ask_all) if each is not None]
        with (
            nullcontext() if self.weights is None else self.weights.asking(asks),
            installed.call(sequence, lambda shape: degrees, weights=self.weights) as call,
            shared_attention(call, self._mesh.whole, partial(enabled_caches, self._module)) as shared,
            serving(shared.answer),
        ):
            call.ask, call.expects_attention = ask, ask is not None and self._is_new
            return installed.forward(self._stock, *args, **kwargs)

    def _slice(
        self, batch: BatchMesh, sequence: SequenceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[BatchSlice | None, SequenceMesh, ContextParallelConfig, tuple[Any, ...], Mapping[str, Any]]:
        """Return this group's slice of the batch, its ranks, degrees and arguments; no slice, and `sequence`, if all share it."""
        batch_degree = self._config.batch_degree
        share = BatchSlice.of(batch, batch_degree, self._given(args, kwargs), self._dims) if batch_degree > 1 else None
        if share is None:
            return None, sequence, self._config.of_all_ranks, args, kwargs
        if joins_items(self._module):
            raise PlanError(
                f"{type(self._module).__name__}: FasterCache makes one half of CFG from the other, and batch_degree={batch_degree} "
                "gives them to different ranks. Set batch_degree=1, or FasterCacheConfig(is_guidance_distilled=True)."
            )
        return share, share.sequence, self._config, *share.take_call(args, kwargs, self._names, self._dims)

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments by name, in the order of the signature."""
        given = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        return {**{name: given[name] for name in self._names if name in given}, **given}


def _check_call(called: nn.Module, module: nn.Module, mesh: SequenceMesh) -> None:
    name = type(module).__name__
    if not mesh.is_alive:
        raise PlanError(
            f"the process group that this {name} was applied with was destroyed. Call remove_context_parallel and "
            "apply_context_parallel again."
        )
    if called is not module:
        raise PlanError(f"this {name} is a copy of one that is context parallel. Call remove_context_parallel before copying it.")


def _call_error(module: nn.Module, kwargs: Mapping[str, Any]) -> PlanError | None:
    """Return the error in the module's mode, or in what it is given, or None."""
    name = type(module).__name__
    if known(module) and (kept := [each for each in KEPT if kwargs.get(each) is not None]):
        return PlanError(f"this {name} would keep keys and values in {kept[0]}, and a rank has those of its tokens. Leave it out.")
    if module.training:
        return PlanError(f"this {name} is in training mode; context parallelism is for inference. Call its method eval. {TRAINING}")
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
        return PlanError(f"this {name} would record gradients. Call it under torch.inference_mode() or torch.no_grad(). {TRAINING}")
    return None


def enabled_caches(module: nn.Module) -> str:
    """Return the names of diffusers' cache hooks on a module's parts; empty if there are none."""
    names = {name for part in module.modules() if (hooks := vars(part).get("_diffusers_hook")) is not None for name in hooks.hooks}
    return ", ".join(sorted(name for name in names if "cache" in name or "broadcast" in name or name.startswith("fbc")))


def attending(module: nn.Module) -> list[nn.Module]:
    """Return diffusers' attention modules in a module."""
    return [inner for inner in module.modules() if hasattr(inner, "processor")]


def joins_items(module: nn.Module) -> bool:
    """Return whether diffusers' FasterCache makes some items of the batch from others."""
    registry = vars(module).get("_diffusers_hook")
    cache = None if registry is None else registry.hooks.get("faster_cache_denoiser")
    return cache is not None and not cache.is_guidance_distilled
