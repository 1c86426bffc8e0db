"""Rank script, one process: the classes of a model and a VAE against their files, and what packs do to them."""

import functools
import importlib
import inspect
import sys
import textwrap
from types import FunctionType
from unittest.mock import patch

import comfy.ldm.flux.math
import comfy.ldm.modules.attention
import comfy.ldm.wan.model
import comfy.ldm.wan.vae
import comfy.ops
import torch
from support import families
from support.models import build
from support.ranks import finish, report, start

from cp_runtime.comfy.ui import changed_code, sources
from cp_runtime.comfy.ui.sources import functions_in

start()
wan = build(families.load("wan").MODELS["wan t2v"])
wan.head.head = comfy.ops.manual_cast.Linear(96, 64)
first = changed_code.changes_of(wan)
report(name="stock", changes=first, again=changed_code.changes_of(wan, again=False) is first)


def foreign(*args, **kwargs):
    """A function of a pack."""
    return args


class Foreign(torch.nn.Module):
    """A class of a pack."""


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


model, attention, math = comfy.ldm.wan.model, comfy.ldm.modules.attention, comfy.ldm.flux.math
Wan, stock = model.WanModel, comfy.ops.disable_weight_init.Linear
CASES = {
    "a method": (Wan, "forward_orig", foreign),
    "a method, wrapped": (Wan, "forward_orig", wrapped(Wan.forward_orig)),
    "a method, partial": (Wan, "unpatchify", functools.partialmethod(Wan.unpatchify)),
    "a method, another one of ComfyUI's": (Wan, "forward_orig", Wan.unpatchify),
    "a method, compiled": (Wan, "forward_orig", torch.compiler.disable(Wan.forward_orig)),
    "a method of an older file": (Wan, "forward_orig", FunctionType(foreign.__code__.replace(co_filename=model.__file__), {})),
    "a block's method": (model.WanAttentionBlock, "forward", foreign),
    "a base class's method": (model.WanSelfAttention, "forward", foreign),
    "a method of an operation": (stock, "forward_comfy_cast_weights", foreign),
    "a method that hides a base's": (comfy.ops.manual_cast.Linear, "forward", foreign),
    "a method of torch's": (torch.nn.Linear, "forward", foreign),
    "attention, by name": (model, "optimized_attention", foreign),
    "attention, of ComfyUI's, by name": (model, "optimized_attention", attention.attention_split),
    "rotations, by name": (model, "apply_rope1", foreign),
    "rotations, where they stand": (math, "apply_rope1", foreign),
    "a function of a function": (math, "_apply_rope1", foreign),
    "a function of torch's": (torch, "addcmul", foreign),
    "a function of torch's, by a library": (torch, "addcmul", textwrap.dedent),
    "a class": (model, "EmbedND", Foreign),
    "a flag of a class": (comfy.ops.manual_cast.Linear, "comfy_cast_weights", False),
    "a constant": (comfy.ops, "NVIDIA_MEMORY_CONV_BUG_WORKAROUND", 2),
    "a constant that is computed": (attention, "FORCE_UPCAST_ATTENTION_DTYPE", torch.float64),
    "a lambda": (model, "repeat_e", lambda e, x: e),
}


def changed(name, value, owner, attribute):
    own = functions_in(value)
    files = {function.__code__.co_filename for function in own}
    quick, changes = changed_code.changes_of(wan, again=False), changed_code.changes_of(wan)
    place = owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"
    foreign = __file__ if __file__ in files else None
    return {"name": name, "what": f"{place}.{attribute}", "quick": quick == changes, "changes": changes, "foreign": foreign}


for name, (owner, attribute, value) in CASES.items():
    with patch.object(owner, attribute, value):
        seen = changed(name, value, owner, attribute)
    report(**seen, after=changed_code.changes_of(wan))
code = Wan.unpatchify.__code__
Wan.unpatchify.__code__ = foreign.__code__.replace(co_name="unpatchify")
seen = changed("code inside a method", foreign, Wan, "unpatchify")
Wan.unpatchify.__code__ = code
report(**seen, after=changed_code.changes_of(wan))

# What packs do to ComfyUI, and no rank would do otherwise.
harmless = [
    (Wan, "teacache_forward", foreign),
    (model, "of_a_pack", foreign),
    (importlib.import_module("comfy.utils"), "load_torch_file", foreign),
    (importlib.import_module("comfy.model_base").WAN21, "extra_conds", foreign),
    (importlib.import_module("comfy.model_management"), "get_torch_device", foreign),
    (importlib.import_module("comfy.samplers"), "calc_cond_batch", foreign),
]
found = []
for owner, attribute, value in harmless:
    with patch.object(owner, attribute, value, create=True):
        found += changed_code.changes_of(wan)
report(name="harmless", changes=found)

# What torch does to itself when it compiles.
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
report(name="compiled", changes=changed_code.changes_of(wan))

# Packages of PYTHONPATH, of `pip install --target`, and editable ones are in none of Python's folders.
for function in (sources.in_library, sources.is_comfy):
    function.cache_clear()
with patch.object(sources, "LIBRARY_PATHS", ("stdlib",)), patch.object(sources.site, "getsitepackages", list):
    changes = changed_code.Comparison({type(module) for module in wan.modules()}).changes
    files = torch.nn.__file__, sys.modules["typing_extensions"].__file__, model.__file__, __file__
    outside = [sources.in_library(file) for file in files]
report(name="packages elsewhere", changes=changes, libraries=outside)
sources.in_library.cache_clear()

vae = comfy.ldm.wan.vae.WanVAE(dim=16, z_dim=4)
clean = changed_code.changes_of(vae)
with patch.object(comfy.ldm.wan.vae.WanVAE, "decode", foreign):
    report(name="a VAE", clean=clean, changes=changed_code.changes_of(vae))
finish()
