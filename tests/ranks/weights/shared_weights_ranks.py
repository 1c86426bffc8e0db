"""Rank script: mirrors of one model with whole and with shared weights, through LoRA changes and unloading. Rank 0 reports.

Arguments: JSON list of [checkpoint, LoRA, loader options, placements].
"""

import copy
import json
import os
import weakref
from functools import partial

import comfy.ops
import torch
import torch.distributed as dist
from comfy import model_management as mm
from mirrors import KEY, lora_of, mirrors_on
from mirrors import call as call_model
from mirrors import load as load_file
from support.ranks import finish, report, start

from cp_runtime.engine.ranks.mesh import BatchMesh
from cp_runtime.engine.weights.blocks import sizes_of
from cp_runtime.engine.weights.sharded import ShardedWeights

rank, world, (wanted,) = start()
CPU = torch.device("cpu")
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


def casts(mirrors):
    """Return how often an op took weights since `given` was cleared, how often it let go of them, and how many are still there."""
    own = {id(parameter) for parameter in mirrors.entries[KEY].patcher.model.parameters()}
    kept = [ref() for refs in given for ref in refs if ref() is not None and id(ref()) not in own]
    return len(given), sum(left), len(kept)


def outputs(path, lora, options, placement):
    """The output of a call after every change of the model, and what was seen on the way."""
    progress = []
    mirrors, outs, seen = mirrors_on(CPU, progress.append), {}, {}
    call = partial(call_model, mirrors, mesh, world, batch=2)
    load = partial(load_file, mirrors, path, options, mesh=mesh, placement=placement, device_bytes=DEVICE_BYTES)

    def with_lora(name, strength):
        load(lora_of(path, lora, strength, options), name)
        outs[name] = call()

    load()
    given.clear(), left.clear()
    outs["as loaded"] = call()
    seen["casts"] = casts(mirrors)
    seen["progress"] = progress == [*sorted(progress[:-1]), None] and (progress[0], progress[-2]) == (0, 1000) and len(progress) > 5
    with_lora("with a LoRA", 1.0)
    with_lora("with another one", 0.25)
    if placement == "whole":
        mirrors.drop([KEY])
        return outs, seen
    load()
    outs["without it"] = call()
    outs["ahead of the blocks"] = call()
    mirror = mirrors.entries[KEY]
    patcher, weights, sizes = mirror.patcher, mirror.weights, sizes_of(mirror.model)
    seen["kinds"] = sorted({type(weight).__name__ for block in weights.blocks.values() for weight in block.weights})
    kept = sum(sharded.shard.nbytes for sharded in weights._sharded.values())
    seen["kept"], seen["part"] = kept, -(-sizes.blocks // world)
    seen["told"] = (patcher.model_size(), patcher.loaded_size())
    patcher.detach()  # as ComfyUI's memory manager does to make room
    mm.current_loaded_models.clear()
    seen["unloaded"] = mirror.weights is None and patcher.loaded_size() == 0
    outs["loaded again"] = call()
    mirrors.drop([KEY])
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
