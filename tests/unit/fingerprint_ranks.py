"""Rank script, one process: the code of a model and of a VAE as a fingerprint, and what node packs do to it."""

import argparse
import collections
import enum
import fractions
import functools
import importlib
import logging
import sys
import textwrap
import time
import types
from types import FunctionType
from unittest.mock import patch

import comfy.ldm.flux.math
import comfy.ldm.modules.attention
import comfy.ldm.wan.model
import comfy.ldm.wan.vae
import comfy.lora
import comfy.ops
import numpy
import torch
from comfy.weight_adapter import LoRAAdapter
from support import families
from support.models import build
from support.ranks import finish, report, start

start()
from cp_runtime.comfy.shared.fingerprint import classes_of, code_of, differing, found  # noqa: E402
from cp_runtime.comfy.shared.objects import Settings, write  # noqa: E402
from cp_runtime.errors import MirrorError  # noqa: E402

wan = build(families.load("wan").MODELS["wan t2v"])
wan.head.head = comfy.ops.manual_cast.Linear(96, 64)
classes = classes_of(wan)
first = code_of(classes)
backwards = code_of(sorted(classes, key=lambda cls: cls.__qualname__, reverse=True))
report(name="stock", names=len(first.hashes), backwards=differing(first.hashes, backwards.hashes), holds=first.holds())
with patch.object(comfy.ldm.modules.attention.optimized_attention, "mark", 1, create=True):
    imported = [
        (f"{module.__name__}:optimized_attention", module.optimized_attention)
        for module in (comfy.ldm.flux.math, comfy.ldm.wan.model)
    ]
    there, back = (code_of((), dict(order)).hashes for order in (imported, imported[::-1]))
report(
    name="a function with an attribute, under two names",
    found=[name for name in there if "mark" in name],
    backwards=differing(there, back),
)


def by_value(network):
    """What travels; or why it does not."""
    try:
        written = write(network, Settings(later=False))
    except MirrorError as error:
        return str(error)
    return written.data, [tensor.numpy().tobytes() for tensor in written.tensors if not tensor.is_meta]


def foreign(*args, **kwargs):
    """A function of a pack."""
    return args


class Foreign(torch.nn.Module):
    """A class of a pack."""


class Callable:
    """A function in the form of an object."""

    uses = 0

    def __init__(self, scale=1, inner=None):
        self.scale, self.inner, self.calls = scale, inner, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        Callable.uses += 1
        return args

    def method(self, *args, **kwargs):
        return args


class Kind(enum.Enum):
    """A choice of a pack."""

    ONE = 1
    OTHER = 2


class Slotted:
    """Settings of a pack."""

    __slots__ = ("scale",)


class Odd:
    """An object that answers nothing."""

    def __getattribute__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        raise RuntimeError("repr")


class Posing:
    """A wrapper that looks like what it wraps."""

    __class__ = FunctionType

    def __call__(self, *args, **kwargs):
        return args


def closed(value):
    def inner(*args, **kwargs):
        return value

    return inner


def counting():
    count = 0

    def counter(*args, **kwargs):
        nonlocal count
        count += 1

    return counter


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
    "an attribute of a function": (model.repeat_e, "scale", 2.0),
    "a constant": (comfy.ops, "NVIDIA_MEMORY_CONV_BUG_WORKAROUND", 2),
    "a constant that is computed": (attention, "FORCE_UPCAST_ATTENTION_DTYPE", torch.float64),
    "a lambda": (model, "repeat_e", lambda e, x: e),
}


def seen(name):
    now = code_of(classes)
    names = differing(first.hashes, now.hashes)
    report(name=name, case=True, holds=first.holds(), names=names, files=sorted({now.files.get(each, "") for each in names}))


for name, (owner, attribute, value) in CASES.items():
    with patch.object(owner, attribute, value, create=isinstance(owner, (type, FunctionType))):
        seen(name)
code = Wan.unpatchify.__code__
Wan.unpatchify.__code__ = foreign.__code__.replace(co_name="unpatchify")
seen("code inside a method")
Wan.unpatchify.__code__ = code
report(name="afterwards", names=differing(first.hashes, code_of(classes).hashes))

# What packs do to ComfyUI, and no rank would do otherwise; and what is in another folder on another computer.
harmless = [
    (importlib.import_module("comfy.sd1_clip"), "__file__", "/elsewhere"),
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


def between(before, after, change=lambda: None):
    """Return the names under which two values of a function differ, and whether what was known of the first one still holds."""
    with patch.object(model, "repeat_e", before):
        one = code_of(classes)
        change()
        holds = one.holds()
        if after is not before:
            model.repeat_e = after
        return {"names": differing(one.hashes, code_of(classes).hashes), "holds": holds}


# Settings of a pack, which its nodes change; and what its code fills as it runs.
SETTINGS = {
    "an entry": ({"scale": 1, "free": foreign}, lambda held: held.update(scale=2)),
    "a new entry": ({"scale": 1}, lambda held: held.update(shift=2)),
    "an entry inside": ({"unet": {"scale": 1}}, lambda held: held["unet"].update(scale=2)),
    "a row inside": ({"unet": [1, 2]}, lambda held: held["unet"].append(3)),
    "an enumerated key": ({Kind.ONE: 1}, lambda held: held.update({Kind.ONE: 2})),
    "an enumerated value": ({"kind": Kind.ONE}, lambda held: held.update(kind=Kind.OTHER)),
    "a namespace": (types.SimpleNamespace(scale=1), lambda held: setattr(held, "scale", 2)),
    "a namespace inside": ({"unet": types.SimpleNamespace(scale=1)}, lambda held: setattr(held["unet"], "scale", 2)),
    "a namespace of a command line": (argparse.Namespace(scale=1), lambda held: setattr(held, "scale", 2)),
}
FILLS = {
    "an entry": "held['n'] = held.get('n', 0) + 1",
    "an entry, by the way": "held['n'] += 1",
    "an entry inside": "held['inner']['n'] += 1",
    "a deleted entry": "del held['n']",
    "a row": "held['inner']['rows'].append(1)",
    "entries": "held.update(m=1)",
    "from a function inside": "(lambda: held.update(m=1))()",
}


def of_a_pack(body, held):
    """A function of a pack, and the value that it uses by name."""
    space = {"__name__": "/packs/some_pack", "held": held}
    exec(f"def function(*args):\n    {body}\n    return held", space)  # noqa: S102
    return space["function"]


for name, (held, change) in SETTINGS.items():
    function = of_a_pack("pass", held)
    changed = functools.partial(change, held)
    report(name=f"settings, {name}", settings=True, **between(function, function, changed))
for name, body in FILLS.items():
    function = of_a_pack(body, {"n": 0, "inner": {"n": 0, "rows": []}})
    report(name=f"filled, {name}", used=True, **between(function, function, function))
cyclic = {"scale": 1}
cyclic.update(one=cyclic, other=cyclic, rows=[cyclic] * 3)
report(name="odd settings", odd=True, **between(of_a_pack("pass", cyclic), of_a_pack("pass", cyclic)))

# An attribute that a helper of the constructor assigns is no cache.
ltxv = build(next(iter(families.load("ltxv").MODELS.values())))
before, ltxv.patchifier = by_value(ltxv), Callable()
report(name="patchifier", field=True, same=True, changed=by_value(ltxv) != before)


report(name="arguments of a partial", **between(functools.partial(foreign, 2.0), functools.partial(foreign, 3.0)))

nested = functools.reduce(lambda inner, _: (inner,), range(3000), ())
one = Callable()
space = {"__name__": "of_a_pack", "value": 1}
exec("def lazily(*args):\n    global value\n    value = 2", space)  # noqa: S102
PAIRS = {
    "a field of a callable object": (Callable(), Callable(2)),
    "a function in one": (Callable(inner=foreign), Callable(inner=wrapped)),
    "a field of a method's object": (Callable().method, Callable(2).method),
    "an object in a closure": (closed(Callable()), closed(Callable(2))),
    "a tuple in a closure": (closed((1, (2, 3))), closed((1, (2, 4)))),
    "a partial in a closure": (closed(functools.partial(foreign, 1)), closed(functools.partial(foreign, 2))),
    "functions around functions": (wrapped(wrapped(foreign)), wrapped(wrapped(closed(1)))),
    "an object as a default": (
        FunctionType(foreign.__code__, {}, "f", (Callable(),)),
        FunctionType(foreign.__code__, {}, "f", (one,)),
    ),
    "what poses as a function": (foreign, Posing()),
    "a cached function": (functools.lru_cache(foreign), functools.lru_cache(wrapped)),
}
one.scale = 3
for name, pair in PAIRS.items():
    report(name=name, pair=True, **between(*pair))
for name, change in {"field": lambda: setattr(one, "scale", 4), "class": lambda: setattr(Callable, "method", foreign)}.items():
    report(name=f"in place, {name}", pair=True, in_place=True, **between(one, one, change))
a, b = wrapped(Wan.unpatchify), wrapped(Wan.forward_orig)
with patch.object(Wan, "unpatchify", a), patch.object(Wan, "forward_orig", b):
    exchanged = code_of(classes)
    Wan.unpatchify, Wan.forward_orig = b, a
    report(name="two wrappers exchanged", pair=True, names=differing(exchanged.hashes, code_of(classes).hashes))

count = counting()
USED = {
    "a counter of an object": (one, lambda: one()),
    "a counter in a closure": (count, lambda: count()),
    "a global that is set at first use": (space["lazily"], lambda: space["lazily"]()),
    "a method of a library's class": (lambda *args: logging.getLogger(), lambda: setattr(logging.Logger, "of_a_pack", foreign)),
}
for name, (function, use) in USED.items():
    report(name=name, used=True, **between(function, function, use))

for name, odd in {"object": Odd(), "number": 10**5000, "tuple": nested, "class": type("Odd", (), {"__module__": 3})}.items():
    report(name=f"odd {name}", odd=True, **between(closed(odd), closed(odd)))
    vars(wan)["of_a_pack"] = odd
    report(name=f"odd {name} in a module", odd=True, names=[] if by_value(wan) == by_value(wan) else [name])
    del wan.of_a_pack
lazy = torch.nn.LazyLinear(3)
report(name="lazy", odd=True, names=[] if by_value(lazy) == by_value(lazy) else ["lazy"])


def with_scale(value):
    scale = Slotted()
    scale.scale = value
    return scale


class Named(list):
    """A list with a name."""

    def __init__(self, name):
        self.name = name


def keyword(value):
    def function(*, given=value):
        return given

    return function


def weighted(value):
    linear = torch.nn.Linear(2, 2, bias=False)
    linear.weight.data.fill_(value)
    return linear


numbers = torch.arange(12.0).view(3, 4)
FIELDS = {
    "a number of NumPy": (numpy.float32(1), numpy.float32(2)),
    "an array": (numpy.ones(3), numpy.zeros(3)),
    "a namespace": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    "slots": (with_scale(1), with_scale(2)),
    "a deque": (collections.deque([1]), collections.deque([2])),
    "a range": (range(3), range(4)),
    "a slice": (slice(3), slice(4)),
    "a fraction": (fractions.Fraction(1, 3), fractions.Fraction(2, 3)),
    "a list with a field": (Named("a"), Named("b")),
    "a cached function": (functools.lru_cache(foreign), functools.lru_cache(wrapped)),
    "defaults by name": (keyword(1), keyword(2)),
    "a transposed tensor": (numbers.T, (numbers + 1).T),
    "a sparse tensor": (numbers.to_sparse(), (numbers + 1).to_sparse()),
    "a module in a list": ([weighted(1)], [weighted(2)]),
}
for name, (before, after) in FIELDS.items():
    wan.of_a_pack = before
    first_look, second_look = by_value(wan), by_value(wan)
    wan.of_a_pack = after
    now = by_value(wan)
    changed = now != first_look
    report(name=f"field, {name}", field=True, same=first_look == second_look, changed=changed)
    del wan.of_a_pack

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
