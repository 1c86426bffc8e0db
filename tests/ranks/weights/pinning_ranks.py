"""Rank script: what host memory ranks take that keep a part of the weights on the host, where ComfyUI would pin it.

`mlock` stands in for `cudaHostRegister`: both have the kernel fetch the pages for writing, which gives a process its own copy of a
page that it has mapped privately. The device is torch's `meta`, with a made-up amount of memory.
"""

import ctypes
import os

from support.ranks import finish, report, start, use_comfyui

rank, world, (checkpoint,) = start()
use_comfyui()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from comfy import model_management as mm  # noqa: E402

from cp_runtime.comfy.memory.rank_file_weights import LoadProgress  # noqa: E402
from cp_runtime.comfy.model.rank_mirrors import Mirrors  # noqa: E402
from cp_runtime.comfy.model.wire_recipe import Recipe, file_stamp  # noqa: E402
from cp_runtime.pool.messages import Load  # noqa: E402
from cp_runtime.pool.protocol import TensorPacker, flatten  # noqa: E402

torch.set_grad_enabled(False)
META = torch.device("meta")
libc = ctypes.CDLL(None, use_errno=True)
inode = str(os.stat(checkpoint).st_ino)
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
mm.EXTRA_RESERVED_VRAM = 0
mm.minimum_inference_memory = lambda: 0
mm.vram_state = mm.VRAMState.NORMAL_VRAM
mm.lowvram_available, mm.MIN_WEIGHT_MEMORY_RATIO = True, 0.0
mm.get_free_memory = lambda device=None, torch_free_too=False: (budget, 0) if torch_free_too else budget


def proportional_bytes():
    """Of the checkpoint's mapping in this process: each page divided by the number of processes that share it."""
    total, ours = 0, False
    with open("/proc/self/smaps") as lines:
        for fields in map(str.split, lines):
            if not fields[0].endswith(":"):
                ours = fields[4] == inode
            elif ours and fields[0] == "Pss:":
                total += int(fields[1]) << 10
    return total


def offload(key, options):
    """Load the model, and put half of it on the device. Returns bytes of the model, of what was pinned, and of the file's pages."""
    global budget
    pinned.clear()
    packer = TensorPacker()
    recipe = Recipe("load_diffusion_model", checkpoint, options, file_stamp(checkpoint)).as_json()
    mirrors.drop(list(mirrors.entries))
    request = Load(key=key, recipe=recipe, patches=flatten({}, packer.add), patches_uuid="u")
    mirrors.load(request, torch.empty(0, dtype=torch.uint8))
    mirror = mirrors.entries[key]
    mirror.patcher.load_device = META
    budget = mirror.patcher.model_size() // 2
    weights = [weight for weight in mirror.patcher.model.parameters() if weight.device.type == "cpu"]
    for weight in weights:  # as a call does that fetches them
        torch.empty_like(weight).copy_(weight)
    mirrors.to_device(mirror, 0)
    on_host = sum(weight.nbytes for weight in mirror.patcher.model.parameters() if weight.device.type == "cpu")
    dist.barrier()  # all ranks have everything mapped
    pages = torch.tensor([proportional_bytes()])
    dist.all_reduce(pages)
    return {"model": mirror.patcher.model_size(), "on_host": on_host, "pinned": sum(pinned), "pages": pages.item()}


mirrors = Mirrors(META, [], LoadProgress(lambda _: None))
report(step="the file's weights", **offload("file", {}))
report(step="converted weights", **offload("converted", {"dtype": "float16"}))
finish()
