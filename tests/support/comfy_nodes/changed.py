"""A node that changes the modules of a model or a VAE in place, as node packs do, and another one that takes it all back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from torch import nn

from .node import node

KEY = "test_changed"
UNDO: list[Callable[[], Any]] = []


def _set(thing: Any, name: str, value: Any) -> Callable[[], Any]:
    """Set an attribute of an instance; return what takes it back."""
    held, old = name in vars(thing), vars(thing).get(name)
    setattr(thing, name, value)
    return lambda: setattr(thing, name, old) if held else vars(thing).pop(name)


def _blocks(network: Any) -> nn.ModuleList:
    return next(module for module in network.children() if isinstance(module, nn.ModuleList) and len(module) > 1)


def _first(network: nn.Module, kind: Any) -> tuple[nn.Module, str, Any]:
    """The first module of a kind: its parent, its name there, and itself."""
    path = next(name for name, module in network.named_modules() if isinstance(module, kind))
    parent, _, name = path.rpartition(".")
    return network.get_submodule(parent), name, network.get_submodule(path)


def _padding(network: nn.Module) -> Callable[[], Any]:
    return _set(_first(network, nn.Conv2d)[2], "padding_mode", "circular")


def _method(network: nn.Module) -> Callable[[], Any]:
    conv = _first(network, nn.Conv2d)[2]
    stock = conv._conv_forward
    return _set(conv, "_conv_forward", lambda *given: stock(*given) * 0.5)


def _call(network: nn.Module) -> Callable[[], Any]:
    linear = _first(_blocks(network), nn.Linear)[2]
    stock = linear._call_impl
    return _set(linear, "_call_impl", lambda *given: stock(*given) * 0.5)


def _activation(network: nn.Module) -> Callable[[], Any]:
    parent, name, stock = _first(_blocks(network), (nn.GELU, nn.SiLU))
    setattr(parent, name, nn.ReLU())
    return lambda: setattr(parent, name, stock)


def _pruned(network: nn.Module) -> Callable[[], Any]:
    blocks = _blocks(network)
    last = blocks[-1]
    del blocks[-1]
    return lambda: blocks.append(last)


def _eps(network: nn.Module) -> Callable[[], Any]:
    norm = next(module for module in network.modules() if isinstance(vars(module).get("eps"), float))
    return _set(norm, "eps", 0.5)


def _parametrized(network: nn.Module) -> Callable[[], Any]:
    linear = _first(_blocks(network), nn.Linear)[2]
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", nn.Threshold(0.0, 0.0))
    return lambda: torch.nn.utils.parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)


def _buffer(network: nn.Module) -> Callable[[], Any]:
    buffer = next(each for each in network.buffers() if each.is_floating_point() and each.numel() > 1)
    buffer.mul_(0.5)
    return lambda: buffer.mul_(2.0)


def _weight(network: nn.Module) -> Callable[[], Any]:
    weight = next(iter(_blocks(network).parameters()))
    weight.data.mul_(0.5)
    return lambda: weight.data.mul_(2.0)


def _hook(network: nn.Module) -> Callable[[], Any]:
    return _blocks(network)[0].register_forward_pre_hook(lambda *given: None).remove


def _hook_of_all(network: nn.Module) -> Callable[[], Any]:
    return torch.nn.modules.module.register_module_forward_pre_hook(lambda *given: None).remove


def _forward(network: nn.Module) -> Callable[[], Any]:
    block = _blocks(network)[0]
    stock = block.forward
    return _set(block, "forward", lambda *given, **more: stock(*given, **more))


def _decode(network: nn.Module) -> Callable[[], Any]:
    stock: Any = network.decode
    return _set(network, "decode", lambda *given: stock(*given) * 0.5)


KINDS = {
    name.strip("_"): kind
    for name, kind in list(globals().items())
    if name.startswith("_") and getattr(kind, "__annotations__", {}).get("network") is nn.Module
}


@contextmanager
def _changed(network: nn.Module, kind: str) -> Iterator[None]:
    undo = KINDS[kind](network)
    try:
        yield
    finally:
        undo()


@node("MODEL", again=True, model="MODEL", kind=list(KINDS))
def TestChangedModel(model: Any, kind: str) -> Any:
    UNDO.append(KINDS[kind](model.model.diffusion_model))
    return model


@node("MODEL", again=True, model="MODEL", kind=list(KINDS))
def TestChangedWhileSampling(model: Any, kind: str) -> Any:
    """Change a clone's model for the time of every call, from its second step on."""
    patched, calls = model.clone(), []

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            return executor(*args, **kwargs)
        with _changed(patched.model.diffusion_model, kind):
            return executor(*args, **kwargs)

    patched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, wrapper)
    return patched


@node("VAE", again=True, vae="VAE", kind=list(KINDS))
def TestChangedVAE(vae: Any, kind: str) -> Any:
    UNDO.append(KINDS[kind](vae.first_stage_model))
    return vae


@node("MODEL_PATCH", again=True, model_patch="MODEL_PATCH")
def TestChangedPatch(model_patch: Any) -> Any:
    """Halve a weight of a model patch's network."""
    weight = next(iter(model_patch.model.parameters()))
    weight.data.mul_(0.5)
    UNDO.append(lambda: weight.data.mul_(2.0))
    return model_patch


@node(again=True)
def TestUnchanged() -> Any:
    """Take back what the others changed."""
    while UNDO:
        UNDO.pop()()
    return {}
