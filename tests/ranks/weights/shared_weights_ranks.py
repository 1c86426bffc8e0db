"""Rank script: mirrors of one model with whole and with shared weights, through LoRA changes and unloading. Rank 0 reports.

Arguments: JSON list of [checkpoint, LoRA, loader options, placements].
"""

import copy
import json
import os
import weakref

from support.ranks import finish, report, start, use_comfyui

rank, world, (wanted,) = start()
use_comfyui()

import comfy.lora  # noqa: E402
import comfy.ops  # noqa: E402
import comfy.utils  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from comfy import model_management as mm  # noqa: E402

from cp_runtime.comfy.memory.rank_file_weights import LoadProgress  # noqa: E402
from cp_runtime.comfy.model.rank_mirrors import Mirrors  # noqa: E402
from cp_runtime.comfy.model.wire_recipe import Recipe, file_stamp  # noqa: E402
from cp_runtime.comfy.patches.wire_weights import encode_weight_patches  # noqa: E402
from cp_runtime.engine.config import SequenceSettings  # noqa: E402
from cp_runtime.engine.cost import DegreePlanner, Rates  # noqa: E402
from cp_runtime.engine.mesh import BatchMesh  # noqa: E402
from cp_runtime.engine.weights.blocks import sizes_of  # noqa: E402
from cp_runtime.engine.weights.sharded import ShardedWeights  # noqa: E402
from cp_runtime.pool.messages import Call, Load  # noqa: E402
from cp_runtime.pool.protocol import TensorPacker, flatten  # noqa: E402

CPU = torch.device("cpu")
RATES = Rates(latency=1e-5, bandwidth=1e9, flops=1e11, memory=1e9, overlap=0.0)
DEVICE_BYTES = 1 << 20  # what ComfyUI's memory manager is told
CONTEXT = "CastBiasWeightContext"  # inside which an op has its weights, since ComfyUI 0.33
mesh = BatchMesh(dist.group.WORLD)
given, left = [], []  # references to the weights that it gave; whether one that was left has let go of them

if hasattr(comfy.ops, CONTEXT):

    class Watched(getattr(comfy.ops, CONTEXT)):
        def __enter__(self):
            weights = super().__enter__()
            given.append([weakref.ref(weight) for weight in weights if weight is not None])
            return weights

        def __exit__(self, *error):
            super().__exit__(*error)
            left.append((self.slf, self.state) == (None, None))

    setattr(comfy.ops, CONTEXT, Watched)


def lora_of(mirrors, path, strength):
    patcher = next(iter(mirrors.entries.values())).patcher
    keys = comfy.lora.model_lora_keys_unet(patcher.model, {})
    loaded = comfy.lora.load_lora(comfy.utils.load_torch_file(path), keys, log_missing=False)
    return {name: [(strength, patch, 1.0, None, None)] for name, patch in loaded.items()}


def load(mirrors, path, options, placement, uuid="none", patches=None):
    packer = TensorPacker()
    tree = flatten(encode_weight_patches(patches or {}), packer.add)
    block = torch.empty(packer.nbytes, dtype=torch.uint8)
    packer.write(block)
    recipe = Recipe("load_diffusion_model", path, options, file_stamp(path)).as_json()
    request = Load(key="k", recipe=recipe, patches=tree, patches_uuid=uuid, placement=placement, device_bytes=DEVICE_BYTES)
    return mirrors.load(request, block, mesh)


def arguments(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 16, 6, 10), "context": (2, 11, 64), "y": (2, 64)}
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return {**made, "timestep": torch.tensor([0.5, 0.5], dtype=dtype), "guidance": torch.tensor([3.5, 3.5], dtype=dtype)}


def call(mirrors):
    model = mirrors.entries["k"].patcher.model
    dtype = model.manual_cast_dtype or model.get_dtype()
    mesh.stats.reset()
    settings = SequenceSettings(ulysses_degree=world, ring_degree=1)
    request = Call(
        key="k", method="_forward", sequence=settings, split=None, batch_degree=1, leading=("x", "timestep"), memory_scale=1.0,
        compile=None, compile_or_raise=True, cancel_every=0, value=None, drop=(),
    )  # fmt: skip
    out, _ = mirrors.call(request, arguments(dtype), mesh, lambda mesh, _: DegreePlanner(settings, mesh.size, RATES), lambda: None)
    return out


def casts(mirrors):
    """Return how often an op took weights since `given` was cleared, how often it let go of them, and how many are still there."""
    own = {id(parameter) for parameter in mirrors.entries["k"].patcher.model.parameters()}
    kept = [ref() for refs in given for ref in refs if ref() is not None and id(ref()) not in own]
    return len(given), sum(left), len(kept)


def outputs(path, lora, options, placement):
    """The output of a call after every change of the model, and what was seen on the way."""
    progress = []
    mirrors, outs, seen = Mirrors(CPU, [], LoadProgress(progress.append)), {}, {}

    def with_lora(name, strength):
        load(mirrors, path, options, placement, name, lora_of(mirrors, lora, strength))
        outs[name] = call(mirrors)

    load(mirrors, path, options, placement)
    given.clear(), left.clear()
    outs["as loaded"] = call(mirrors)
    seen["casts"] = casts(mirrors)
    seen["progress"] = progress == [*sorted(progress[:-1]), None] and (progress[0], progress[-2]) == (0, 1000) and len(progress) > 5
    with_lora("with a LoRA", 1.0)
    with_lora("with another one", 0.25)
    if placement == "whole":
        mirrors.unload("k")
        return outs, seen
    load(mirrors, path, options, placement)
    outs["without it"] = call(mirrors)
    outs["ahead of the blocks"] = call(mirrors)
    mirror = mirrors.entries["k"]
    patcher, weights, sizes = mirror.patcher, mirror.weights, sizes_of(mirror.model)
    seen["kinds"] = sorted({type(weight).__name__ for block in weights.blocks.values() for weight in block.weights})
    kept = sum(shared.shard.nbytes for shared in weights._shared.values())
    seen["kept"], seen["part"] = kept, -(-sizes.blocks // world)
    seen["told"] = (patcher.model_size(), patcher.loaded_size())
    patcher.detach()  # as ComfyUI's memory manager does to make room
    mm.current_loaded_models.clear()
    seen["unloaded"] = mirror.weights is None and patcher.loaded_size() == 0
    outs["loaded again"] = call(mirrors)
    mirrors.unload("k")
    return outs, seen


def one_rank_loads_again():
    """Its peers know the order of blocks, and hold the last two; it does not. Returns the outputs of the calls that follow."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    whole, x, group = copy.deepcopy(model), torch.randn(3, 64), mesh.sequence().weights

    def shared():
        weights = ShardedWeights(model, group, CPU)
        for name in weights.blocks:
            weights.keep(name)
        return weights

    weights, right = shared(), []
    for again in (False, True, False, True):
        if again and rank == 1:
            weights.remove()
            for layer, other in zip(model, whole, strict=True):
                layer.weight, layer.bias = other.weight, other.bias
            weights = shared()
        with weights.call():
            right.append(torch.equal(model(x), whole(x)))
    return right


torch.set_grad_enabled(False)
report(right=one_rank_loads_again())
for path, lora, options, placements in json.loads(wanted):
    expected, of_whole = outputs(path, lora, options, "whole")
    for placement in placements:
        found, seen = outputs(path, lora, options, placement)
        report(
            model=os.path.basename(path),
            placement=placement,
            std=min(out.float().std().item() for out in expected.values()),
            lora=(expected["with a LoRA"] - expected["as loaded"]).abs().max().item(),
            differing=[name for name in found if not torch.equal(expected.get(name, expected["as loaded"]), found[name])],
            steps=len(found),
            casts_of_whole=of_whole["casts"],
            **seen,
        )
finish()
