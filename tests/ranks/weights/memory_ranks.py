"""Rank script: where a mirror's weights are while it is loaded, patched and dropped; and what is planned for a call.

The device is torch's `meta`, with a made-up amount of memory: it takes weights like an accelerator, and whatever ComfyUI would copy
back from it raises an error.
"""

import gc
import io
import os
import threading
import weakref

import comfy.utils
import torch
from comfy import model_management as mm
from comfy.weight_adapter import LoRAAdapter
from mirrors import in_file, make_up_memory, mirrors_on
from mirrors import load as load_file
from support.ranks import finish, report, start

from cp_runtime.comfy.rank.memory import room
from cp_runtime.comfy.shared.loading import file_backed_weights, weights_on_host
from cp_runtime.comfy.ui.apply import call_memory
from cp_runtime.engine.weights import pages

_, _, (checkpoint,) = start()
torch.set_grad_enabled(False)
META = torch.device("meta")
KEY = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
inode = str(os.stat(checkpoint).st_ino)
progress = []
mirrors = mirrors_on(META, progress.append)
budget = 1 << 60


def free():
    return budget - sum(mirror.patcher.loaded_size() for mirror in mirrors.entries.values())


make_up_memory(free)


def load(uuid, patches):
    patcher = load_file(mirrors, checkpoint, patches=patches, uuid=uuid)
    patcher.load_device = META
    for module in patcher.model.modules():  # small, and not in the file: they stay
        for name, buffer in list(module.named_buffers(recurse=False)):
            delattr(module, name)
            setattr(module, name, buffer)
    return patcher


def where(patcher):
    """Bytes of the transformer's weights by place: on the device, in the file's pages, in memory of this process."""
    weights = list(patcher.model.diffusion_model.parameters())
    device, file = sum(weight.nbytes for weight in weights if weight.device == META), in_file(weights, inode)
    return {"device": device, "file": file, "private": sum(weight.nbytes for weight in weights) - device - file}


def shown():
    """What was told of the progress since the last time."""
    told, end = progress[:-1], progress[-1]
    progress.clear()
    return {"first": told[0], "last": told[-1], "steps": len(set(told)) > 10, "rises": told == sorted(told), "end": end}


def lora(strength):
    return {KEY: [(strength, LoRAAdapter(set(), (torch.ones(768, 4), torch.ones(4, 256), 4.0, None, None, None)), 1.0, None, None)]}


def replaced():
    """What loading replaces for a while."""
    return torch.nn.Module.load_state_dict, comfy.utils.load_torch_file, mm.unet_inital_load_device, mm.unet_offload_device


def two_threads_load():
    """The second one begins before the first one is done, and ends after it. Whether all is as it was then."""
    before, began, first_left = replaced(), threading.Event(), threading.Event()

    def second():
        with weights_on_host(), file_backed_weights():
            began.set()
            first_left.wait(20)

    thread = threading.Thread(target=second)
    with weights_on_host(), file_backed_weights():
        thread.start()
        began.wait(0.3)  # or it waits for this one
    first_left.set()
    thread.join()
    return replaced() == before


def as_on_two_file_systems():
    """Ranges that are taken for the file's, where a file of another device has the same inode, and where it has not."""

    def with_another(path, *args, **kwargs):
        file = open(path, *args, **kwargs)  # noqa: SIM115  (whoever calls closes it)
        if path != "/proc/self/smaps":
            return file
        with file:
            lines = file.readlines()
        ours = next(line.split() for line in lines if line.split()[4:5] == [inode])
        other = " ".join(["7f0000000000-7f0000001000", *ours[1:3], "ff:ff", *ours[4:]])
        return io.StringIO("".join([*lines, other, "\nAnonymous: 0 kB\nSwap: 0 kB\n"]))

    pages.open = with_another
    found = pages.mapped(checkpoint)
    del pages.open
    return {"theirs": (0x7F0000000000, 0x7F0000001000) in found, "ours": len(found)}


report(step="two threads", restored=two_threads_load())
patcher = load("u0", {})
report(step="two file systems", **as_on_two_file_systems())
model = weakref.ref(patcher.model)
report(step="read", **where(patcher))
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
scales = [call_memory(patcher, (1, 16, 8, 8), conds)[1] for conds in ({"positive": [{}]}, conditions)]
report(step="conditions", scales=scales)
del patcher
gc.disable()
freed = []
mm.soft_empty_cache = lambda: freed.append(model() is None)  # what is freed later stays taken of the device
mirrors.drop(["k"])
report(step="dropped", freed=freed, listed=len(mm.current_loaded_models))
finish()
