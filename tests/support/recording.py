"""Records a model's own forward: every module that is called, with its arguments by name, and every attention. Imports ComfyUI.

`support.tracer` holds a family's table against such a recording, and `make plan` drafts a table from it.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cp_runtime.engine.plan import argument_names
from cp_runtime.nested import map_tensors


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """One call of a module. Tensors are copies, since models add to their hidden states in place.

    Args:
        path: of the module in the model.
        arguments: by name, as plans write them: what comes through `**name` is "name.argument".
    """

    path: str
    arguments: Mapping[str, Any]
    output: Any


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One call of ComfyUI's attention.

    Args:
        path: of the innermost module that was running.
        name: full name of the function, in the module that imported it.
        reached: whether transformer_options came with it, through which attention is found.
        q, k, v, out: `[B, L, heads, D]`.
    """

    path: str
    name: str
    reached: bool
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    mask: Tensor | None


@dataclass
class Recording:
    """What happened in one forward, in the order in which calls returned."""

    modules: list[ModuleCall] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    output: Any = None


CHOOSER = "optimized_attention_for_device"
"""Returns the attention to call; plans and recordings write its name with "()" behind it."""

Enter = Callable[[str, nn.Module, Mapping[str, Any]], None]
Leave = Callable[[str, Any], None]
Attend = Callable[[str, Callable[..., Tensor], tuple[Any, ...], dict[str, Any]], Tensor]


@contextmanager
def watched(model: nn.Module, enter: Enter, leave: Leave, attend: Attend) -> Iterator[None]:
    """Report the calls of all modules inside `model`, and of ComfyUI's attention by any name."""

    def entered(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        enter(path, module, named_arguments(module, args, kwargs))

    def left(path: str, _: nn.Module, __: Any, output: Any) -> None:
        leave(path, output)

    handles, replaced = [], []
    try:
        for path, module in model.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(functools.partial(entered, path), with_kwargs=True))
                handles.append(module.register_forward_hook(functools.partial(left, path)))
        for owner in [module for name, module in sys.modules.items() if name.startswith("comfy.ldm.")]:
            for name in vars(owner).keys() & {"optimized_attention", "optimized_attention_masked", CHOOSER}:
                function, reported = vars(owner)[name], f"{owner.__name__}.{name}"
                replaced.append((owner, name, function))
                made = _choosing(f"{reported}()", function, attend) if name == CHOOSER else _reporting(reported, function, attend)
                setattr(owner, name, made)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for owner, name, function in replaced:
            setattr(owner, name, function)


def _reporting(name: str, function: Callable[..., Tensor], attend: Attend) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        return attend(name, function, args, kwargs)

    return call


def _choosing(name: str, choose: Callable[..., Callable[..., Tensor]], attend: Attend) -> Callable[..., Callable[..., Tensor]]:
    @functools.wraps(choose)
    def call(*args: Any, **kwargs: Any) -> Callable[..., Tensor]:
        return _reporting(name, choose(*args, **kwargs), attend)

    return call


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a module's forward by the names that plans use."""
    parameters, rest = _parameters(type(module).forward)
    named = dict(zip(argument_names(module), args, strict=False))
    return named | {name if name in parameters else f"{rest}.{name}": value for name, value in kwargs.items()}


@functools.cache
def _parameters(forward: Callable[..., Any]) -> tuple[Set[str], str]:
    """Names of all of them, and of the one that takes what is left."""
    parameters = inspect.signature(forward).parameters
    return parameters.keys(), next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), "")


def record(
    model: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any], paths: Container[str] | None = None
) -> Recording:
    """Call `forward`, a method of `model`, and write down what happens.

    Args:
        paths: modules whose calls are of interest; by default all. What goes through an encoder of pictures is large.
    """
    found = Recording()
    running: list[tuple[str, Mapping[str, Any] | None]] = []  # without arguments, where they are of no interest

    def enter(path: str, _: nn.Module, named: Mapping[str, Any]) -> None:
        wanted = paths is None or path in paths
        running.append(
            (path, copied({k: v for k, v in named.items() if not k.endswith("transformer_options")}) if wanted else None)
        )

    def leave(path: str, output: Any) -> None:
        _, named = running.pop()
        if named is not None:
            found.modules.append(ModuleCall(path=path, arguments=named, output=copied(output)))

    def attend(name: str, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        given = [arg.peek() if hasattr(arg, "peek") else arg for arg in args]  # containers, which the function empties
        out = function(*args, **kwargs)
        path = running[-1][0] if running else ""
        found.attention.append(_attention_call(path, name, out, *given, **kwargs))
        return out

    with watched(model, enter, leave, attend):
        found.output = copied(forward(**arguments))
    return found


def _attention_call(
    path: str,
    name: str,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> AttentionCall:
    """A call with the signature of ComfyUI's attention functions."""
    if skip_reshape:
        shaped = [t.transpose(1, 2) for t in (q, k, v)]
    else:
        shaped = [t.reshape(*t.shape[:2], -1, q.shape[-1] // heads) for t in (q, k, v)]
    result = out.transpose(1, 2) if skip_output_reshape else out.unflatten(-1, (heads, -1))
    q, k, v, result = (t.clone() for t in (*shaped, result))
    reached = kwargs.get("transformer_options") is not None
    return AttentionCall(path=path, name=name, reached=reached, q=q, k=k, v=v, out=result, mask=copied(mask))


def copied(value: Any) -> Any:
    """The same nested value with copies of its tensors."""
    return map_tensors(value, Tensor.clone)


def shapes_in(value: Any) -> Any:
    """The same nested value with the shapes of its tensors."""
    return map_tensors(value, lambda tensor: tuple(tensor.shape))  # type: ignore[arg-type, return-value]


def numbers(value: Any) -> Iterator[int]:
    """Whole numbers above 1 in nested lists: they may be positions or counts of tokens."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers(item)
    elif type(value) is int and value > 1:
        yield value
