"""A node that changes the modules of a model or a VAE in place, as node packs do, and another one that takes it all back."""

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import comfy.ldm.common_dit
import comfy.ldm.flux.layers
import comfy.lora
import comfy.ops
import torch
from comfy.patcher_extension import WrappersMP
from torch import nn
from torch.nn import functional as F

from .node import kinds, node

KEY = "test_changed"
EINOPS: Any = sys.modules["einops.einops"]
LAYER = (nn.Linear, nn.Conv2d, nn.Conv3d)
UNDO: list[Callable[[], Any]] = []


def _set(thing: Any, name: str, value: Any) -> Callable[[], Any]:
    """Set an attribute of an instance; return what takes it back."""
    held, old = name in vars(thing), vars(thing).get(name)
    setattr(thing, name, value)
    return lambda: setattr(thing, name, old) if held else vars(thing).pop(name)


def _blocks(network: Any) -> nn.ModuleList:
    lists = (*network.children(), *network.modules())
    return next(module for module in lists if isinstance(module, nn.ModuleList) and len(module) > 1)


def _first(network: nn.Module, kind: Any) -> tuple[nn.Module, str, Any]:
    """The first module of a kind: its parent, its name there, and itself."""
    path = next(name for name, module in network.named_modules() if isinstance(module, kind))
    parent, _, name = path.rpartition(".")
    return network.get_submodule(parent), name, network.get_submodule(path)


def _padding(network: nn.Module) -> Callable[[], Any]:
    """As nodes for seamless pictures do."""
    undo = [_set(conv, "padding_mode", "circular") for conv in network.modules() if isinstance(conv, nn.Conv2d)]
    return lambda: [each() for each in undo]


def _method(network: nn.Module) -> Callable[[], Any]:
    conv = _first(network, nn.Conv2d)[2]
    stock = conv._conv_forward
    return _set(conv, "_conv_forward", lambda *given: stock(*given) * 0.5)


def _call(network: nn.Module) -> Callable[[], Any]:
    linear = _first(_blocks(network), LAYER)[2]
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
    linear = _first(_blocks(network), LAYER)[2]
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


def _buffer_dtype(network: nn.Module) -> Callable[[], Any]:
    module, name = next((m, n) for m in network.modules() for n, b in m._buffers.items() if b is not None and b.is_floating_point())
    stock: Any = module._buffers[name]
    module._buffers[name] = stock.half()
    return lambda: module._buffers.update({name: stock})


def _row(network: nn.Module) -> Callable[[], Any]:
    weight = _first(_blocks(network), LAYER)[2].weight
    row = weight.data[1].clone()
    weight.data[1].mul_(9)
    return lambda: weight.data[1].copy_(row)


def _element(network: nn.Module) -> Callable[[], Any]:
    weight = _first(_blocks(network), LAYER)[2].weight
    number = weight.data[1, 3].clone()
    weight.data[1, 3] += 30
    return lambda: weight.data[1, 3].copy_(number)


def with_weight(network: nn.Module, make: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    linear = _first(_blocks(network), LAYER)[2]
    stock = linear._parameters["weight"]
    linear._parameters["weight"] = make(stock.detach())
    return lambda: linear._parameters.update(weight=stock)


def _weight_replaced(network: nn.Module) -> Callable[[], Any]:
    return with_weight(network, lambda weight: nn.Parameter(weight * 2, requires_grad=False))


def _weight_dtype(network: nn.Module) -> Callable[[], Any]:
    return with_weight(network, lambda weight: nn.Parameter((weight * 2).bfloat16(), requires_grad=False))


def _bias_none(network: nn.Module) -> Callable[[], Any]:
    linear = next(module for module in _blocks(network).modules() if getattr(module, "bias", None) is not None)
    stock = linear._parameters["bias"]
    linear._parameters["bias"] = None
    return lambda: linear._parameters.update(bias=stock)


def _plain_tensor(network: nn.Module) -> Callable[[], Any]:
    linear = _first(_blocks(network), LAYER)[2]
    stock = linear._parameters.pop("weight")
    linear.weight = stock.detach() * 2

    def undo() -> None:
        del linear.weight
        linear._parameters["weight"] = stock

    return undo


def _field(network: nn.Module) -> Callable[[], Any]:
    """Of an object that a module holds: settings, processors."""
    for module in network.modules():
        for value in vars(module).values():
            plain = [name for name, field in getattr(value, "__dict__", {}).items() if isinstance(field, (bool, int, float))]
            if plain and not isinstance(value, (nn.Module, torch.Tensor, type)) and not callable(value):
                return _set(value, plain[-1], not getattr(value, plain[-1]))
    raise ValueError(f"{type(network).__name__} has no object with a field")


def _in_a_list(network: nn.Module) -> Callable[[], Any]:
    for module in network.modules():
        for value in vars(module).values():
            if isinstance(value, list) and value and isinstance(value[0], (int, float)):
                value.append(value[0])
                return value.pop
    raise ValueError(f"{type(network).__name__} has no list")


def _class(network: nn.Module) -> Callable[[], Any]:
    linear = _first(_blocks(network), LAYER)[2]
    stock = type(linear)
    linear.__class__ = type("Doubled", (stock,), {"forward": lambda self, x: stock.forward(self, x) * 2})
    return lambda: setattr(linear, "__class__", stock)


def _training(network: nn.Module) -> Callable[[], Any]:
    network.train()
    return network.eval


def _reordered(network: nn.Module) -> Callable[[], Any]:
    blocks = _blocks(network)
    first, second = blocks[0], blocks[1]
    blocks[0], blocks[1] = second, first

    def undo() -> None:
        blocks[0], blocks[1] = first, second

    return undo


def _hook(network: nn.Module) -> Callable[[], Any]:
    return _blocks(network)[0].register_forward_pre_hook(lambda *given: None).remove


def _hook_of_all(network: nn.Module) -> Callable[[], Any]:
    return torch.nn.modules.module.register_module_forward_pre_hook(lambda *given: None).remove


def _forward(network: nn.Module) -> Callable[[], Any]:
    block = _blocks(network)[0]
    stock = block.forward
    return _set(block, "forward", lambda *given, **more: stock(*given, **more))


def _root(network: nn.Module) -> Callable[[], Any]:
    """With something that cannot be sent."""
    stock: Any = network.forward_orig
    lock = threading.Lock()

    def forward(*given: Any, **more: Any) -> Any:
        with lock:
            return stock(*given, **more)

    return _set(network, "forward_orig", forward)


def _decode(network: nn.Module) -> Callable[[], Any]:
    stock: Any = network.decode
    return _set(network, "decode", lambda *given: stock(*given) * 0.5)


KINDS = kinds(globals(), nn.Module)


def _while_sampling(model: Any, change: Callable[[Any], Callable[[], Any]]) -> Any:
    """Return a clone that makes a change for the time of every call, from the second one on."""
    patched, calls = model.clone(), []

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        undo = change(patched.model.diffusion_model) if len(calls) > 1 else lambda: None
        try:
            return executor(*args, **kwargs)
        finally:
            undo()

    patched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, wrapper)
    return patched


class _Callable:
    """A function in the form of an object."""

    def __init__(self, stock: Callable[..., Any]) -> None:
        self.stock = stock

    def __call__(self, *given: Any, **more: Any) -> Any:
        return self.stock(*given, **more) * 0.5


def _halved(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def halved(*given: Any, **more: Any) -> Any:
        return stock(*given, **more) * 0.5

    return halved


def _generated(stock: Callable[..., Any]) -> Callable[..., Any]:
    def half(out: Any) -> Any:
        return tuple(map(half, out)) if isinstance(out, tuple) else out * 0.5

    space: dict[str, Any] = {"stock": stock, "half": half}
    exec("def generated(*given, **more):\n    return half(stock(*given, **more))", space)  # noqa: S102  (as packs do)
    return functools.wraps(stock)(space["generated"])


def _of(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    """Replace an attribute of a class or a module for everyone; return what takes it back."""
    held, stock = name in vars(owner) or not isinstance(owner, type), getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, stock) if held else delattr(owner, name)


CODE: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "block": lambda network: _of(type(_blocks(network)[0]), "forward", _generated(type(_blocks(network)[0]).forward)),
    "layer norm": lambda network: _of(nn.LayerNorm, "forward", _halved(nn.LayerNorm.forward)),
    "linear": lambda network: _of(F, "linear", _halved(F.linear)),
    "silu": lambda network: _of(F, "silu", _halved(F.silu)),
    "gelu": lambda network: _of(F, "gelu", _halved(F.gelu)),
    "object": lambda network: _of(comfy.ldm.common_dit, "pad_to_patch_size", _Callable(comfy.ldm.common_dit.pad_to_patch_size)),
    "defaults": lambda network: _of(comfy.ldm.flux.layers.timestep_embedding, "__defaults__", (1000, 100.0)),
    "tensor": lambda network: _of(torch.Tensor, "chunk", _reversed(torch.Tensor.chunk)),
    "einops": lambda network: _of(EINOPS, "_apply_recipe", _halved(EINOPS._apply_recipe)),
    "property": lambda network: _of(type(_blocks(network)[0]), "training", property(lambda self: True)),
    "constant": lambda network: _of(comfy.ops.disable_weight_init.Linear, "comfy_cast_weights", True),
    "patches": lambda network: _of(comfy.lora, "calculate_weight", _halved(comfy.lora.calculate_weight)),
}


def _reversed(stock: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **more: tuple(reversed(stock(*given, **more)))


CHANGES = {**KINDS, **CODE}


@node("MODEL", again=True, model="MODEL", kind=list(CHANGES))
def TestChangedModel(model: Any, kind: str) -> Any:
    """Change a model's modules, or code for all models."""
    UNDO.append(CHANGES[kind](model.model.diffusion_model))
    return model


@node("MODEL", again=True, model="MODEL", kind=list(CHANGES))
def TestChangedWhileSampling(model: Any, kind: str) -> Any:
    """Do so for a clone, for the time of every call, from its second step on."""
    return _while_sampling(model, CHANGES[kind])


@node("MODEL", again=True, model="MODEL")
def TestChangedApply(model: Any) -> Any:
    """Replace what a model does around its network."""
    base, stock = model.model, model.model.apply_model
    UNDO.append(_set(base, "apply_model", lambda *given, **more: stock(*given, **more) * 0.9))
    return model


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
