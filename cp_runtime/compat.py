"""Private names of torch and diffusers without public equivalents. No other module uses any."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

Function = TypeVar("Function", bound=Callable[..., Any])
Owner = TypeVar("Owner")


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a module's own hooks of the forward, before it and after it. They are live: later hooks are in them, too."""
    return module._forward_pre_hooks, module._forward_hooks


def global_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks of the forward of every module."""
    return nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks


_followers: WeakKeyDictionary[Any, Callable[[Any, nn.Module, str, Any], None]] = WeakKeyDictionary()


def on_registration(owner: Owner, tell: Callable[[Owner, nn.Module, str, Any], None]) -> Callable[[], object]:
    """Call `tell` before a module or a parameter is put into any module of this process, as long as the owner lives.

    Args:
        tell: gets the owner, the module, the name, and what is put there.

    Returns:
        A function that ends it.
    """
    _follow_registrations()
    _followers[owner] = tell
    return lambda: _followers.pop(owner, None)


@cache
def _follow_registrations() -> None:
    def put(parent: nn.Module, name: str, value: object) -> None:
        for owner, tell in _followers.items():
            tell(owner, parent, name, value)

    nn.modules.module.register_module_module_registration_hook(put)
    nn.modules.module.register_module_parameter_registration_hook(put)


def state_dict_loader(cls: type[nn.Module]) -> Callable[..., Any]:
    """Return the method by which a module class loads its part of a state dict."""
    return cls._load_from_state_dict


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Flatten a mesh to one axis, its last axis running fastest."""
    return mesh if mesh.ndim == 1 else mesh._flatten()


def versions(values: Iterable[Tensor]) -> tuple[int, ...] | None:
    """Return the number of in-place changes of each tensor; None if one was made in inference mode, where torch does not count."""
    counts: list[int] = []
    for value in values:
        if (changes := in_place_changes(value)) is None:
            return None
        counts.append(changes)
    return tuple(counts)


def in_place_changes(value: Tensor) -> int | None:
    """Return the number of in-place changes of a tensor; None if it was made in inference mode, where torch does not count."""
    return None if value.is_inference() else value._version


def fused_attention_functions() -> frozenset[Callable[..., Any]]:
    """Return torch's functions that run a whole attention layer, whose inner calls cannot be intercepted."""
    names = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
    return frozenset({F.multi_head_attention_forward, *(getattr(torch, name) for name in names if hasattr(torch, name))})


profiler_is_on: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether one of torch's profilers runs in this thread."""


def load_op(name: str) -> Callable[..., Any] | None:
    """Return an ATen operator, or None if this torch lacks it."""
    return getattr(torch.ops.aten, name, None)


def start_all_to_all(received: Tensor, send: Tensor, arriving: Sequence[int], sent: Sequence[int], group: Any) -> Any:
    """Call `dist.all_to_all_single` with `async_op`, without its checks, which take longer than the rest on the host."""
    return group.alltoall_base(received, send, arriving, sent, _asynchronous())


@cache
def _asynchronous() -> Any:
    options: Any = dist.AllToAllOptions()
    if hasattr(options, "asyncOp"):  # since torch 2.8
        options.asyncOp = True
    return options


def as_parameter(tensor: Tensor, requires_grad: bool) -> nn.Parameter:
    """Make a tensor a parameter. `nn.Parameter` would detach tensors that wrap others, and some of those copy their scales then."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    if not hasattr(tensor, "__tensor_flatten__"):
        return nn.Parameter(tensor, requires_grad)
    tensor._is_param = True
    return tensor.requires_grad_(requires_grad)  # type: ignore[return-value]


def parameter_slots(module: nn.Module) -> dict[str, Any]:
    """Return the dict of a module's own parameters. Writing to it skips checks, and takes a tenth of `setattr`'s time."""
    return module._parameters


def before_apply(module: nn.Module, check: Callable[[Callable[[Tensor], Tensor]], None]) -> Callable[[], None]:
    """Call `check` with the function that `to`, `half` and the like are about to apply to the module's tensors.

    Returns:
        A function that undoes it.
    """

    def apply(function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        check(function)
        return type(module)._apply(module, function, *args, **kwargs)

    vars(module)["_apply"] = apply
    return lambda: vars(module).pop("_apply", None)


def tensor_without_storage(
    cls: type[Any], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """Make a tensor of a subclass without storage."""
    return Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=device)


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the errors of `torch.compile` for code it cannot compile, before any of a full graph has run."""
    from torch._dynamo import exc  # imported only on use, as it takes a second

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


@contextmanager
def compiler_settings(variants: int) -> Iterator[None]:
    """Allow a function to be compiled for that many kinds of arguments, and treat equal sizes as unrelated, while active."""
    from torch import _dynamo as dynamo
    from torch.fx.experimental import _config as shapes

    with dynamo.config.patch(recompile_limit=variants), shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


def on_compilation(tell: Callable[[int], None]) -> None:
    """Call `tell` at the start of every compilation of this process, with the running number, and with 0 at its end."""
    from torch._dynamo.callback import callback_handler

    numbers = itertools.count(1)
    callback_handler.register_start_callback(lambda *_: tell(next(numbers)))
    callback_handler.register_end_callback(lambda *_: tell(0))


def compiler_counts() -> dict[str, int]:
    """Count this process's compiled graphs, and its graph breaks."""
    from torch._dynamo.utils import counters

    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


# torch 2.7 and newer put it into the error for `fullgraph=True`.
_REASON: dict[str, Any] = {}
if "reason" in inspect.signature(torch.compiler.disable).parameters:
    _REASON["reason"] = (
        "context parallelism splits and gathers tokens outside of graphs, so the whole model is not one; "
        "model.compile_repeated_blocks(fullgraph=True) is"
    )


def not_compiled(function: Function) -> Function:
    """Keep a function, and everything it calls, out of the graphs of `torch.compile`."""
    left_out: Function = torch.compiler.disable(function, **_REASON)
    return left_out


def not_compiled_itself(function: Function) -> Function:
    """Keep a function out of the graphs of `torch.compile`, but not what it calls."""
    left_out: Function = torch.compiler.disable(function, recursive=False, **_REASON)
    return left_out


def frames_are_compiled() -> bool:
    """Return whether torch's compiler looks at every function that is called here, as inside of a compiled model."""
    return callable(_frame_compiler())


def one_graph_is_asked_for() -> bool:
    """Return whether that compiler was told not to break graphs."""
    return bool(getattr(_frame_compiler(), "_one_graph", False))


def _frame_compiler() -> object:
    with suppress(ImportError, AttributeError):
        from torch._C._dynamo.eval_frame import get_eval_frame_callback

        return get_eval_frame_callback()
    return None


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the original module of a `torch.compile` result, or the module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout that a process group was made with; None, torch's default, if its backend does not tell."""
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else group._device_types[0]
    return getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)


CALL_TORCH = {"native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math"}
"""Attention backends of diffusers that call torch's `scaled_dot_product_attention`."""


@contextmanager
def replaced_backends(make: Callable[[str, Callable[..., Tensor]], Callable[..., Tensor]]) -> Iterator[None]:
    """Have diffusers' other attention backends be what `make` returns for their names and functions, while active."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    backends: dict[Any, Callable[..., Tensor]] = {} if dispatch is None else dispatch._AttentionBackendRegistry._backends
    before = {each: function for each, function in backends.items() if each.value not in CALL_TORCH}
    backends.update({each: make(each.value, function) for each, function in before.items()})
    try:
        yield
    finally:
        backends.update(before)


def attention_backend_of(processor: object) -> str | None:
    """Return the name of the backend that a diffusers attention processor dispatches to; None if it chooses none."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is None or not hasattr(processor, "_attention_backend"):
        return None
    chosen = processor._attention_backend or dispatch._AttentionBackendRegistry.get_active_backend()[0]
    return str(getattr(chosen, "value", chosen))
