"""Rank script, one process: the code of a model and of a VAE as a fingerprint, and what node packs do to it."""

import functools
import importlib
import sys
import textwrap
import time
from types import FunctionType
from unittest.mock import patch

import comfy.ldm.flux.math
import comfy.ldm.modules.attention
import comfy.ldm.wan.model
import comfy.ldm.wan.vae
import comfy.lora
import comfy.ops
import torch
from comfy.weight_adapter import LoRAAdapter
from support import families
from support.models import build
from support.ranks import finish, report, start

start()
from cp_runtime.comfy.shared.fingerprint import classes_of, code_of, differing, found  # noqa: E402
from cp_runtime.comfy.shared.state import change_in, state_of, without_later  # noqa: E402

wan = build(families.load("wan").MODELS["wan t2v"])
wan.head.head = comfy.ops.manual_cast.Linear(96, 64)
classes = classes_of(wan)
first = code_of(classes)
backwards = code_of(sorted(classes, key=lambda cls: cls.__qualname__, reverse=True))
report(name="stock", names=len(first.hashes), backwards=differing(first.hashes, backwards.hashes), holds=first.holds())


def foreign(*args, **kwargs):
    """A function of a pack."""
    return args


class Foreign(torch.nn.Module):
    """A class of a pack."""


class Callable:
    """A function in the form of an object."""

    def __call__(self, *args, **kwargs):
        return args


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


space = {}
exec("def generated(*args, **kwargs):\n    return args", space)  # noqa: S102  (its file is no file)
model, attention, math = comfy.ldm.wan.model, comfy.ldm.modules.attention, comfy.ldm.flux.math
Wan, stock = model.WanModel, comfy.ops.disable_weight_init.Linear
CASES = {
    "a method": (Wan, "forward_orig", foreign),
    "a method, wrapped": (Wan, "forward_orig", wrapped(Wan.forward_orig)),
    "a method, partial": (Wan, "unpatchify", functools.partialmethod(Wan.unpatchify)),
    "a method, another one of ComfyUI's": (Wan, "forward_orig", Wan.unpatchify),
    "a method, compiled": (Wan, "forward_orig", torch.compiler.disable(Wan.forward_orig)),
    "a method of an older file": (Wan, "forward_orig", FunctionType(foreign.__code__.replace(co_filename=model.__file__), {})),
    "a method that was generated": (Wan, "forward_orig", space["generated"]),
    "a block's method": (model.WanAttentionBlock, "forward", foreign),
    "a base class's method": (model.WanSelfAttention, "forward", foreign),
    "a method of an operation": (stock, "forward_comfy_cast_weights", foreign),
    "a method that hides a base's": (comfy.ops.manual_cast.Linear, "forward", foreign),
    "a property that hides an attribute": (model.WanSelfAttention, "num_heads", property(lambda self: 3)),
    "a method of torch's": (torch.nn.Linear, "forward", foreign),
    "the call of every module": (torch.nn.Module, "__call__", foreign),
    "attention, by name": (model, "optimized_attention", foreign),
    "attention, of ComfyUI's, by name": (model, "optimized_attention", attention.attention_split),
    "rotations, by name": (model, "apply_rope1", foreign),
    "rotations, by an object": (model, "apply_rope1", Callable()),
    "rotations, where they stand": (math, "apply_rope1", foreign),
    "a function of a function": (math, "_apply_rope1", foreign),
    "defaults": (model.sinusoidal_embedding_1d, "__defaults__", (7,)),
    "a function of torch's": (torch, "addcmul", foreign),
    "a function of torch's, by a library": (torch, "addcmul", textwrap.dedent),
    "a function behind torch's modules": (torch.nn.functional, "gelu", foreign),
    "another one": (torch.nn.functional, "silu", foreign),
    "a method of tensors": (torch.Tensor, "chunk", foreign),
    "an operator of tensors": (torch.Tensor, "__add__", foreign),
    "a function inside of einops": (sys.modules["einops.einops"], "_apply_recipe", foreign),
    "a class that a forward uses": (comfy.ops, "QuantizedTensor", Foreign),
    "a flag of a class": (comfy.ops.manual_cast.Linear, "comfy_cast_weights", False),
    "a constant": (comfy.ops, "NVIDIA_MEMORY_CONV_BUG_WORKAROUND", 2),
    "a constant that is computed": (attention, "FORCE_UPCAST_ATTENTION_DTYPE", torch.float64),
    "a lambda": (model, "repeat_e", lambda e, x: e),
}


def seen(name):
    now = code_of(classes)
    names = differing(first.hashes, now.hashes)
    report(name=name, case=True, holds=first.holds(), names=names, files=sorted({now.files.get(each, "") for each in names}))


for name, (owner, attribute, value) in CASES.items():
    with patch.object(owner, attribute, value, create=isinstance(owner, type)):
        seen(name)
code = Wan.unpatchify.__code__
Wan.unpatchify.__code__ = foreign.__code__.replace(co_name="unpatchify")
seen("code inside a method")
Wan.unpatchify.__code__ = code
report(name="afterwards", names=differing(first.hashes, code_of(classes).hashes))

# What packs do to ComfyUI, and no rank would do otherwise.
harmless = [
    (model, "of_a_pack", foreign),
    (importlib.import_module("comfy.utils"), "load_torch_file", foreign),
    (importlib.import_module("comfy.model_base").WAN21, "extra_conds", foreign),
    (importlib.import_module("comfy.model_management"), "get_torch_device", foreign),
    (importlib.import_module("comfy.samplers"), "calc_cond_batch", foreign),
]
names = []
for owner, attribute, value in harmless:
    with patch.object(owner, attribute, value, create=True):
        names += differing(first.hashes, code_of(classes).hashes)
report(name="harmless", names=names)

# ComfyUI's server shows progress, which ranks do without.
seedvr = [importlib.import_module("comfy.ldm.seedvr.vae").VideoAutoencoderKLWrapper]
shown = code_of(seedvr)
with patch.object(importlib.import_module("comfy.utils"), "PROGRESS_BAR_HOOK", foreign):
    report(name="progress", names=differing(shown.hashes, code_of(seedvr).hashes))

# An attribute that a helper of the constructor assigns is no cache.
ltxv = build(next(iter(families.load("ltxv").MODELS.values())))
before, ltxv.patchifier = state_of(ltxv), Callable()
report(name="patchifier", names=[change_in(without_later(ltxv, before), without_later(ltxv, state_of(ltxv)))])

both = []
for number in (2.0, 3.0):
    with patch.object(model, "repeat_e", functools.partial(foreign, number)):
        both.append(code_of(classes).hashes)
report(name="arguments of a partial", names=differing(*both))

# What torch does to itself when it compiles.
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
report(name="compiled", names=differing(first.hashes, code_of(classes).hashes))

roots = {name: found(name) for name in ("comfy.lora:calculate_weight", "comfy.weight_adapter.lora:LoRAAdapter")}
patches = code_of(roots=roots)
with patch.object(comfy.lora, "weight_decompose", foreign, create=True), patch.object(LoRAAdapter, "calculate_weight", foreign):
    report(name="weight patches", names=differing(patches.hashes, code_of(roots=roots).hashes))
vae = classes_of(comfy.ldm.wan.vae.WanVAE(dim=16, z_dim=4))
clean = code_of(vae)
with patch.object(comfy.ldm.wan.vae.WanVAE, "decode", foreign):
    report(name="a VAE", names=differing(clean.hashes, code_of(vae).hashes))


def best(function, times):
    def once():
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    return min(once() for _ in range(times))


report(name="time", walk=best(lambda: code_of(classes), 5), holds=best(clean.holds, 50))
finish()
