"""Rank script, one process: what is rebuilt of patches and networks equals what was sent, and patches name nothing else."""

import functools
import sys
from types import ModuleType, SimpleNamespace

import comfy.ops
import server
import torch
from comfy.ldm.modules.attention import attention_pytorch
from comfy.model_patcher import ModelPatcher
from comfy_extras.nodes_model_downscale import PatchModelAddDownscale
from comfy_extras.nodes_model_patch import QwenImageBlockWiseControlNet, UsoStyleProjectorPatch
from support.ranks import answer, finish, report, start
from torch import nn

from cp_runtime.comfy.rank import patches as node_patches
from cp_runtime.comfy.rank.forward import LocalResiduals
from cp_runtime.comfy.rank.layers import functions_of
from cp_runtime.comfy.rank.objects import read_leaves
from cp_runtime.comfy.shared.attention import SAGE_MODES, attention_function
from cp_runtime.comfy.shared.forward import LAYERS, PATCHES
from cp_runtime.comfy.shared.objects import write
from cp_runtime.comfy.shared.patches import listed
from cp_runtime.comfy.ui.attention import _name_of, checked_name
from cp_runtime.comfy.ui.obstacles import check_classes
from cp_runtime.comfy.ui.patches import PatchSet
from cp_runtime.engine.attention.kernels import installed
from cp_runtime.engine.state import CallState
from cp_runtime.errors import MirrorError, UnsupportedError
from cp_runtime.pool.protocol import TensorPacker, flatten, read_tensor, unflatten

server.PromptServer.instance = SimpleNamespace(routes=None)  # the test nodes look at it
from support.comfy_nodes import attention as overrides  # noqa: E402

start()
CPU = torch.device("cpu")


def send(value):
    packer = TensorPacker()
    tree = flatten(value, packer.add)
    block = torch.zeros(packer.nbytes, dtype=torch.uint8)
    packer.write(block)
    return unflatten(tree, lambda leaf: read_tensor(block, leaf).clone())


def rebuilt_of(network):
    return read_leaves(send(write(network).leaves), CPU)


def refused(function, *args):
    try:
        function(*args)
    except MirrorError:
        return True
    return False


# A network: one class with an attribute that is a set, a parameter that is not there, a buffer, and one of ComfyUI's own.
network = nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3), nn.GELU(approximate="tanh"))
network.names = {"a", "b"}
network.current_weight_patches_uuid = object()


class Local(nn.GELU):
    """A class that a rank would find here, but that stands under no name there."""

    __qualname__ = "gone.<locals>.Local"


class Renamed(nn.GELU):
    """A class under the name of another one."""

    __qualname__ = "Local"


in_training = nn.Dropout(0.5)
copy = rebuilt_of(network.eval())
x = torch.randn(5, 4)
qwen = QwenImageBlockWiseControlNet(num_layers=1, dim=8, device=CPU, dtype=torch.float32, operations=comfy.ops.manual_cast)
report(
    name="network",
    same=torch.equal(network(x), copy(x)) and copy.names == network.names and copy[0].bias is None,
    clean=not hasattr(copy, "current_weight_patches_uuid"),
    printed=repr(rebuilt_of(qwen)) == repr(qwen),
    keys=qwen.state_dict().keys() == rebuilt_of(qwen).state_dict().keys(),
    refused=[refused(write, nn.Sequential(made)) for made in (Local(), Renamed(), in_training)],
)

# A function with data, and an object that holds a network.


class Recorder:
    """What a node sees of a model."""

    def __init__(self):
        self.patches = {}

    def get_model_object(self, name):
        return self

    def percent_to_sigma(self, percent):
        return 1.0 - percent

    def clone(self):
        return self

    def set_model_input_block_patch_after_skip(self, patch):
        self.patches["input_block_patch_after_skip"] = [patch]

    def set_model_output_block_patch(self, patch):
        self.patches["output_block_patch"] = [patch]


recorder = Recorder()
PatchModelAddDownscale.execute(recorder, 3, 2.0, 0.0, 1.0, True, "bilinear", "bilinear")
uso = UsoStyleProjectorPatch(ModelPatcher(qwen, CPU, CPU), torch.ones(2, 3))
uso.of = qwen  # the rank's own, there
options = {"patches": {**recorder.patches, "post_input": [uso, uso]}, "patches_replace": {"dit": {}}}
patches = PatchSet.of(options, qwen)
entry, networks = patches.encoded, patches.networks
(key,) = networks
node_patches.ATTACHED[key] = ModelPatcher(rebuilt_of(networks[key]), CPU, CPU)


class Call:
    """A call on one rank."""

    class mesh:
        size = 1


rebuilt = node_patches.read_patches(send(entry[PATCHES]), qwen, Call, CPU).options
h, at = torch.randn(1, 2, 8, 8), {"block": ("input", 3), "sigmas": torch.tensor([0.5])}
first, second = rebuilt["patches"]["post_input"]
report(
    name="patches",
    function=torch.equal(
        rebuilt["patches"]["input_block_patch_after_skip"][0](h, at), recorder.patches["input_block_patch_after_skip"][0](h, at)
    ),
    shared=first is second,
    object=torch.equal(first.encoded_image, uso.encoded_image) and repr(first.model_patch.model) == repr(qwen),
    module=first.of is qwen,
)

# What a run of another patcher has left in the transformer, which ComfyUI takes out before the next.


class OfAPack(nn.Sequential):
    """A module with others inside."""


def classes(backup):
    model = SimpleNamespace(diffusion_model=nn.Sequential(OfAPack(nn.Linear(2, 2))))
    return answer(UnsupportedError, check_classes, SimpleNamespace(model=model, object_patches_backup=backup)) or ""


report(
    name="left",
    refused="a node replaced the class of 0 by __main__.OfAPack" in classes({}),
    other="a node replaced" in classes({"diffusion_model.00": None}),
    left=classes({"diffusion_model.0": None}) == "",
)

# Residuals of a ControlNet on the second of three ranks.
state = CallState(1, 3)
whole, other = torch.randn(2, 7, 4), torch.randn(2, 5, 4)
residuals = LocalResiduals([whole, None, whole, other], state, ("img",), CPU)
before = torch.equal(residuals[0], whole)  # nothing is split yet
state.define("img", 7)
residuals = LocalResiduals([whole, None, whole, other], state, ("img",), CPU)
short = residuals.pop()
taken = [residuals[i] for i in range(len(residuals))]
report(
    name="residuals",
    before=before,
    first=torch.equal(taken[0], whole[:, 3:5]),
    none=taken[1] is None,
    once=taken[2] is taken[0],
    short=torch.equal(short, other[:, 3:5]),
)

# A function around a listed one has its name, and may do something else.


def skip(args, extra):
    return args


skip.__module__, skip.__qualname__ = "comfy_extras.nodes_slg", "SkipLayerGuidanceDiT.execute.<locals>.skip"
around = functools.wraps(skip)(lambda *args: None)
report(name="listed", itself=listed(skip) is not None, around=[listed(around) is None, listed(functools.partial(skip)) is None])

# Attention that a node chose: what an override of a pack stands for, and what a rank calls for it.


def chosen(override, device_type="cuda"):
    return answer(UnsupportedError, checked_name, override, device_type)


def missing(error):
    return "needs the package sageatt" in error and "Install it" in error


report(
    name="attention read",
    own=[chosen(make(name), "cpu") == name for make in (overrides.backend, overrides.per_model)
         for name in ("pytorch", "split", "sub_quad")],
    modes=[_name_of(overrides.sage(mode)) == mode for mode in SAGE_MODES],
    flash=_name_of(overrides.flash()) == "flash",
    unknown=["of its own" in chosen(override) for override in (
        overrides.sage("another"), overrides.with_a_condition("pytorch"), overrides.registered("of_a_pack"), report,
        functools.partial(overrides.backend("pytorch")), lambda func, *args: func(*args),
    )],
    installed=[missing(chosen(overrides.sage(mode))) for mode in SAGE_MODES],
    device=["does not run on cpu" in chosen(make, "cpu") for make in (overrides.sage("auto"), overrides.flash())],
    refused=[refused(attention_function, name) for name in ("os:system", "attention_basic", "sage", *SAGE_MODES)],
)  # fmt: skip

# Layers with a function that the model file chose: a call tells them the override for it, wherever it gives them its options.


class Layer(nn.Module):
    def __init__(self, function=None):
        super().__init__()
        self.choice = nn.Module()
        self.choice.config, self.choice.function = {"attention": "some"}, function

    def forward(self, x, transformer_options=None):
        return (transformer_options or {}).get(overrides.OPTIMIZED)


def mismatch(*names):
    return answer(MirrorError, functions_of, layers, names)


layers = nn.ModuleList([Layer(attention_pytorch), Layer(), Layer(functools.partial(attention_pytorch, scale=2))])
plain, scaled = "attention_pytorch", "attention_pytorch(scale=2)"
override = {overrides.OPTIMIZED: "all", LAYERS: {plain: "its own", scaled: "scaled"}}
found = mismatch(plain, scaled)
report(
    name="layers",
    found=found == {plain: attention_pytorch, scaled: layers[2].choice.function} and mismatch(plain, scaled) is found,
    told=[
        layer(x, override) == layer(x, transformer_options=override) == name
        for layer, name in zip(layers, ("its own", "all", "scaled"), strict=True)
    ],
    none=layers[0](x) is None and layers[0](x, {overrides.OPTIMIZED: "all"}) == "all",
    missing="another" in mismatch(plain, scaled, "another"),
)

# SageAttention needs a GPU: a module that writes down what it is told, and attends exactly.
told = []


def sageattn(q, k, v, *, tensor_layout="HND", is_causal=False, sm_scale=None, **settings):
    told.append((tensor_layout, q.dtype, settings))
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=sm_scale).to(q.dtype)


for package in ("sageattention", "sageattn3"):
    sys.modules[package] = stand_in = ModuleType(package)
    stand_in.__spec__ = object()
    vars(stand_in).update({mode.function: sageattn for mode in SAGE_MODES.values()})
installed.cache_clear()
torch.manual_seed(0)
qkv = [torch.randn(2, 7, 6 * 8), torch.randn(2, 9, 6 * 8), torch.randn(2, 9, 6 * 8)]
split = [t.unflatten(-1, (6, 8)).transpose(1, 2) for t in qkv]
grouped = [split[0], *(t[:, :2] for t in split[1:])]
mask = torch.rand(2, 1, 7, 9) > 0.3


def close(name, tensors, **options):
    expected = attention_pytorch(*tensors, 6, **options)
    out = attention_function(name)(*tensors, 6, **options)
    return out.shape == expected.shape and out.dtype == expected.dtype and (out - expected).abs().max().item() < 2e-3


report(
    name="attention called",
    layouts=[close(name, qkv) and close(name, split, skip_reshape=True)
             and close(name, qkv, skip_output_reshape=True) for name in SAGE_MODES],
    grouped=[close(name, grouped, skip_reshape=True, enable_gqa=True) for name in SAGE_MODES],
    scaled=[close(name, qkv, scale=0.1) for name in SAGE_MODES],
    half=all(dtype == torch.float16 for _, dtype, _ in told),
    settings=all(any(settings == mode.settings for *_, settings in told) for mode in SAGE_MODES.values()),
    masked=[close(name, qkv, mask=mask) for name in SAGE_MODES],
    exact=[torch.equal(attention_function(name)(*qkv, 6, low_precision_attention=False), attention_pytorch(*qkv, 6))
           for name in SAGE_MODES],
)  # fmt: skip
finish()
