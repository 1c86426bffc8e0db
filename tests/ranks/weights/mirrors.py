"""What scripts do with a rank's models: load a file, patch it, call it."""

import functools
import mmap
import os
from types import SimpleNamespace

import comfy.lora
import comfy.sd
import comfy.utils
import torch
import torch.distributed as dist
from comfy import model_management as mm

from cp_runtime.comfy.rank.memory import LoadProgress
from cp_runtime.comfy.rank.mirrors import Mirrors
from cp_runtime.comfy.shared.values import packed
from cp_runtime.comfy.ui.values import value_of
from cp_runtime.comfy.ui.weight_patches import written_patches
from cp_runtime.engine.cost import DegreePlanner, Rates
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.pool.messages import Block, Call, Load
from cp_runtime.pool.protocol import TensorPacker
from cp_runtime.system import system

KEY = "k"


def mirrors_on(device, progress=lambda _: None):
    """Return the mirrors of a rank whose device this is; `progress` is told of loading."""
    return Mirrors(torch.device(device), LoadProgress(progress))


def new_stock(path, **dtypes):
    """Return a patcher as ComfyUI's own loader makes it. `dtypes`: its options."""
    options = {name: getattr(torch, value) for name, value in dtypes.items()}
    return comfy.sd.load_diffusion_model(path, options, disable_dynamic=True)


@functools.cache
def stock(path, in_file=False, **dtypes):
    """Return the patcher of a file in ComfyUI's process. `in_file`: its weights are pages of the file, as with some loaders."""
    patcher = new_stock(path, **dtypes)
    if in_file:
        weights = comfy.utils.load_torch_file(path)
        patcher.model.diffusion_model.load_state_dict(weights, strict=False, assign=True)  # some norms have other names there
    return patcher


@functools.cache
def sent(path, in_file=False, **dtypes):
    """Return what ComfyUI's process, which is rank 0, sends of a file: the network, blocks of memory, and their inodes. And how a
    LoRA may name its weights."""
    found = [None]
    if dist.get_rank() == 0:
        patcher = stock(path, in_file, **dtypes)
        value = value_of(patcher.model).of(patcher)
        blocks = tuple(Block(address=block.address, nbytes=block.size, is_file=block.is_file) for block in value.blocks)
        inodes = {os.fstat(block.fd).st_ino for block in value.blocks}
        network, keys = packed(value.data, value.places), comfy.lora.model_lora_keys_unet(patcher.model, {})
        found = [SimpleNamespace(network=network, blocks=blocks, inodes=inodes, lora_keys=keys)]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(found)
    return found[0]


def mapped(block, device):
    """Return a block of memory as a rank has it: see `pool.worker.Worker.mapped`."""
    own = block.is_file or device.type == "cpu"
    with open(system.foreign_fd(*block.address, writable=not own), "rb") as file:
        return system.private_pages(file.fileno()) if own else mmap.mmap(file.fileno(), 0)


def load(mirrors, path, options=None, patches=None, uuid="none", mesh=None, in_file=False, **more):
    """Load a file under KEY, as a rank does that is told to; return its patcher. All ranks do so. `in_file`: see `stock`."""
    packer, value = TensorPacker(), sent(path, in_file, **(options or {}))
    network = packer.add(torch.frombuffer(bytearray(value.network), dtype=torch.uint8), "network")
    tree = tuple(packer.add(leaf) for leaf in written_patches(patches or {}).leaves)
    block = torch.empty(packer.nbytes, dtype=torch.uint8)
    packer.write(block)
    request = Load(
        key=KEY, name=os.path.basename(path), network=network, blocks=value.blocks, patches=tree, patches_uuid=uuid,
        memory_nbytes=packer.nbytes, **more,
    )  # fmt: skip
    mirrors.load(request, block, lambda: [mapped(each, mirrors.device) for each in value.blocks], mesh)
    return mirrors.entries[KEY].patcher


def lora_of(path, lora, strength=1.0, options=None):
    """Return a LoRA file as patches of a model, which is loaded with these options."""
    keys = sent(path, **(options or {})).lora_keys
    loaded = comfy.lora.load_lora(comfy.utils.load_torch_file(lora), keys, log_missing=False)
    return {name: [(strength, patch, 1.0, None, None)] for name, patch in loaded.items()}


def flux_inputs(dtype=torch.float32, device="cpu", batch=1):
    """Return arguments for the forward of the checkpoint "flux"."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (batch, 16, 6, 10), "context": (batch, 11, 64), "y": (batch, 64)}
    made = {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}
    numbers = {"timestep": 0.5, "guidance": 3.5}
    return made | {name: torch.full((batch,), value, dtype=dtype, device=device) for name, value in numbers.items()}


RATES = Rates(latency=1e-5, bandwidth=1e9, flops=1e11, memory=1e9, overlap=0.0)


def call(mirrors, mesh, ulysses, batch=1, pipeline=None, arguments=None):
    """Return the output of the model under KEY, called as by a worker. `arguments`: of its forward; None = `flux_inputs`."""
    model, settings = mirrors.entries[KEY].patcher.model, SequenceSettings(ulysses_degree=ulysses, ring_degree=1)
    request = Call(
        key=KEY, method="_forward", sequence=settings, ranks=mesh.size, batch_degree=1,
        by_conditioning=False, leading=("x", "timestep"),
        in_place=("control",), memory=(1.0,) * batch, memory_scale=1.0, compile=None, compile_or_raise=True, cancel_every=0,
        value=None, drop=(), pipeline=pipeline,
    )  # fmt: skip
    arguments = arguments or flux_inputs(model.manual_cast_dtype or model.get_dtype(), batch=batch)
    out, _ = mirrors.call(request, arguments, mesh, lambda mesh, _: DegreePlanner(settings, mesh.size, RATES), lambda: None)
    return out


def make_up_memory(free):
    """Have ComfyUI's memory manager work as with a GPU of NVIDIA, on a device of which `free()` bytes are free."""
    mm.EXTRA_RESERVED_VRAM = 0
    mm.minimum_inference_memory = lambda: 0
    mm.vram_state = mm.VRAMState.NORMAL_VRAM
    mm.lowvram_available, mm.MIN_WEIGHT_MEMORY_RATIO = True, 0.0
    mm.get_free_memory = lambda device=None, torch_free_too=False: (free(), 0) if torch_free_too else free()


def as_mapped(weights, inodes):
    """Return the bytes of weights that are pages of files which this process has mapped, and not written to."""
    with open("/proc/self/maps") as lines:
        spans = [line.split()[0].split("-") for line in lines if int(line.split()[4]) in inodes]
    ranges = [(int(low, 16), int(high, 16)) for low, high in spans]
    here = [(w.data_ptr(), w.data_ptr() + w.nbytes) for w in weights if w.device.type == "cpu"]
    return sum(end - at for at, end in here if any(a <= at < b for a, b in ranges) and not system.is_written(at, end))
