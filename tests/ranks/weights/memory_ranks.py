"""Rank script: where a mirror's weights are while it is loaded, patched and dropped; and what is planned for a call.

The device is torch's `meta`, with a made-up amount of memory: it takes weights like an accelerator, and whatever ComfyUI would copy
back from it raises an error. Arguments: checkpoint, and "shared" or "file", where ComfyUI's process has the weights.
"""

import gc
import os
import weakref

import torch
from comfy import model_management as mm
from comfy.weight_adapter import LoRAAdapter
from mirrors import as_mapped, make_up_memory, mirrors_on, sent, stock
from mirrors import load as load_file
from support.ranks import finish, report, start

from cp_runtime.comfy.rank.memory import room
from cp_runtime.comfy.ui.apply import call_memory

_, _, (checkpoint, place) = start()
torch.set_grad_enabled(False)
META = torch.device("meta")
KEY = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
in_file = place == "file"
inodes = sent(checkpoint, in_file).inodes
progress = []
mirrors = mirrors_on(META, progress.append)
budget = 1 << 60


def free():
    return budget - sum(mirror.patcher.loaded_size() for mirror in mirrors.entries.values())


make_up_memory(free)


def load(uuid, patches):
    patcher = load_file(mirrors, checkpoint, patches=patches, uuid=uuid, in_file=in_file)
    patcher.load_device = META
    for module in patcher.model.modules():  # small, and not in the file: they stay
        for name, buffer in list(module.named_buffers(recurse=False)):
            delattr(module, name)
            setattr(module, name, buffer)
    return patcher


def where(patcher):
    """Bytes of the transformer's weights by place: on the device, in pages that ComfyUI's process has too, in this one's own."""
    weights = list(patcher.model.diffusion_model.parameters())
    device, common = sum(weight.nbytes for weight in weights if weight.device == META), as_mapped(weights, inodes)
    return {"device": device, "common": common, "private": sum(weight.nbytes for weight in weights) - device - common}


def shown():
    """What was told of the progress since the last time."""
    told, end = progress[:-1], progress[-1]
    progress.clear()
    return {"first": told[0], "last": told[-1], "steps": len(set(told)) > 10, "rises": told == sorted(told), "end": end}


def lora(strength):
    return {KEY: [(strength, LoRAAdapter(set(), (torch.ones(768, 4), torch.ones(4, 256), 4.0, None, None, None)), 1.0, None, None)]}


patcher = load("u0", {})
model = weakref.ref(patcher.model)
own, weights = (list(each.model.diffusion_model.parameters()) for each in (stock(checkpoint, in_file), patcher))
report(step="read", **where(patcher), of_comfyui=as_mapped(own, inodes), in_file=as_mapped(weights, {os.stat(checkpoint).st_ino}))
mirrors.to_device(mirrors.entries["k"], 0)
report(step="on the device", **where(patcher))
report(step="progress", **shown())
patcher = load("u1", lora(1.0))
mirrors.to_device(mirrors.entries["k"], 0)
report(step="with a LoRA", **where(patcher))
report(step="progress with a LoRA", **shown())
patcher = load("u2", lora(0.5))
mirrors.to_device(mirrors.entries["k"], 0)
report(step="with another LoRA", **where(patcher))
budget = patcher.loaded_size()
mm.free_memory(patcher.model_size() // 2, META)
report(step="half of it makes room", **where(patcher))
mm.free_memory(1e30, META)
report(step="all of it makes room", **where(patcher), listed=len(mm.current_loaded_models))
size = patcher.model_size()
budget = 2 * size
mirrors.to_device(mirrors.entries["k"], 0)
report(step="back on the device", **where(patcher))
for call, needed in (("small", 0.2), ("large", 1.6), ("smaller again", 0.8), ("small again", 0.2)):
    mirrors.to_device(mirrors.entries["k"], needed * size)
    report(step=call, **where(patcher), free=free() / size, room=room(META) / size)  # in sizes of the model
conditions = {"positive": [{"reference_latents": [torch.zeros(1, 16, 8, 24)]}, {}], "negative": [{}]}
scales = [call_memory(stock(checkpoint, in_file), (1, 16, 8, 8), conds)[1] for conds in ({"positive": [{}]}, conditions)]
report(step="conditions", scales=scales)
del patcher
gc.disable()
freed = []
mm.soft_empty_cache = lambda: freed.append(model() is None)  # what is freed later stays taken of the device
mirrors.drop(["k"])
report(step="dropped", freed=freed, listed=len(mm.current_loaded_models))
finish()
