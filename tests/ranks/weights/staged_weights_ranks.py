"""Rank script: mirrors of one model, whole on one rank and in stages over all of them, through LoRA changes and unloading.

Rank 0, the last stage, reports. Arguments: folder of checkpoints, LoRA, and as JSON the checkpoints.
"""

import json
import os
from functools import partial

import torch
import torch.distributed as dist
from comfy import model_management as mm
from mirrors import KEY, call, lora_of, mirrors_on
from mirrors import load as load_file
from support.ranks import finish, of_all, report, start

from cp_runtime.engine.ranks.config import PipelineSettings
from cp_runtime.engine.ranks.mesh import BatchMesh
from cp_runtime.nested import stored

rank, world, (folder, lora, names) = start()
EXACT, PATCHES = (PipelineSettings(stages=world, patches=number) for number in (1, 3))


def outputs(path, mesh, pipeline, **placement):
    """The output of a call after every change of the model, and the bytes of its weights that are here."""
    mirrors, outs = mirrors_on("cpu"), {}
    load = partial(load_file, mirrors, path, mesh=mesh if pipeline else None, **placement)
    for name, strength in (("as loaded", 0), ("with a LoRA", 1.0), ("without it", 0)):
        load(patches=lora_of(path, lora, strength), uuid=name) if strength else load()
        outs[name] = call(mirrors, mesh, 1, pipeline=pipeline)
    patcher = mirrors.entries[KEY].patcher
    patcher.detach()  # as ComfyUI's memory manager does to make room
    mm.current_loaded_models.clear()
    outs["loaded again"] = call(mirrors, mesh, 1, pipeline=pipeline)
    if pipeline:
        outs["keys and values kept"] = call(mirrors, mesh, 1, pipeline=PATCHES)
        outs["patches"] = call(mirrors, mesh, 1, pipeline=PATCHES)
    here = [weight for weight in patcher.model.parameters() if type(stored(weight)[0]).__name__ != "AbsentWeight"]
    held = sum(part.nbytes for weight in here for part in stored(weight))
    told = patcher.model_size()
    mirrors.drop([KEY])
    return outs, held, told


torch.set_grad_enabled(False)
mesh = BatchMesh(dist.group.WORLD)
for name in json.loads(names):
    path = os.path.join(folder, f"{name}.safetensors")
    expected, whole, _ = outputs(path, BatchMesh(None), None)
    found, held, told = outputs(path, mesh, EXACT, placement="staged", stages=world)
    stale = found.pop("patches").float() - found["as loaded"].float()
    report(
        model=name,
        std=expected["as loaded"].float().std().item(),
        lora=(expected["with a LoRA"] - expected["as loaded"]).abs().max().item(),
        differing=[step for step in found if not torch.equal(expected.get(step, expected["as loaded"]), found[step])],
        stale=(stale.abs().max() / expected["as loaded"].float().std()).item(),
        steps=len(found),
        whole=whole,
        held=of_all(held),
        told=of_all(told),
    )
finish()
