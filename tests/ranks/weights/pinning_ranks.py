"""Rank script: what host memory ranks take that keep a part of the weights on the host, where ComfyUI would pin it.

`mlock` stands in for `cudaHostRegister`: both have the kernel fetch the pages for writing, which gives a process its own copy of a
page that it has mapped privately. The device is torch's `meta`, with a made-up amount of memory.
"""

import ctypes
import gc
import os

import torch
import torch.distributed as dist
from comfy import model_management as mm
from mirrors import KEY, load, make_up_memory, mirrors_on, sent, stock
from support.processes import pss_where
from support.ranks import finish, report, start

rank, world, (checkpoint,) = start()
torch.set_grad_enabled(False)
META = torch.device("meta")
SHARED = "/memfd:context-parallel"  # memory of ComfyUI's process, which it keeps the weights in for the ranks
libc = ctypes.CDLL(None, use_errno=True)
pinned = []


class Runtime:
    """`torch.cuda.cudart()`."""

    def cudaHostRegister(self, address, size, flags):
        assert libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0, os.strerror(ctypes.get_errno())
        pinned.append(size)
        return 0

    def cudaHostUnregister(self, address):
        return 0


torch.cuda.cudart = Runtime
mm.MAX_PINNED_MEMORY = 1 << 40  # as on a device of NVIDIA
make_up_memory(lambda: budget)


def offload(in_file=False, **options):
    """Load the model, and put half of it on the device. Returns bytes of the model, of what was pinned, and of all pages of the
    memory that ranks map."""
    global budget
    pinned.clear()
    mirrors.drop(list(mirrors.entries))
    sent.cache_clear(), stock.cache_clear()
    gc.collect()
    patcher = load(mirrors, checkpoint, options, in_file=in_file)
    patcher.load_device = META
    budget = patcher.model_size() // 2
    weights = [weight for weight in patcher.model.parameters() if weight.device.type == "cpu"]
    for weight in weights:  # as a call does that fetches them
        torch.empty_like(weight).copy_(weight)
    mirrors.to_device(mirrors.entries[KEY], 0)
    on_host = sum(weight.nbytes for weight in patcher.model.parameters() if weight.device.type == "cpu")
    dist.barrier()  # all ranks have everything mapped
    pages = torch.tensor([pss_where(os.getpid(), lambda name: name == checkpoint or name.startswith(SHARED))])
    dist.all_reduce(pages)
    return {"model": patcher.model_size(), "on_host": on_host, "pinned": sum(pinned), "pages": pages.item()}


mirrors = mirrors_on(META)
report(step="pages of the file", **offload(in_file=True))
report(step="as loaded", **offload())
report(step="converted", **offload(dtype="float16"))
finish()
