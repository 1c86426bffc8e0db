"""What scripts do with a rank's models: load a file, patch it, call it."""

import comfy.lora
import comfy.utils
import torch
from comfy import model_management as mm

from cp_runtime.comfy.rank.memory import LoadProgress
from cp_runtime.comfy.rank.mirrors import Mirrors
from cp_runtime.comfy.shared.patches import encode_weight_patches
from cp_runtime.comfy.shared.recipe import Recipe, file_stamp
from cp_runtime.engine.cost import DegreePlanner, Rates
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.pool.messages import Call, Load
from cp_runtime.pool.protocol import TensorPacker, flatten

KEY = "k"


def mirrors_on(device, progress=lambda _: None):
    """Return the mirrors of a rank whose device this is; `progress` is told of loading."""
    return Mirrors(torch.device(device), LoadProgress(progress))


def load(mirrors, path, options=None, patches=None, uuid="none", mesh=None, **more):
    """Load a file under KEY, as a rank does that is told to; return its patcher."""
    packer = TensorPacker()
    tree = flatten(encode_weight_patches(patches or {}), packer.add)
    block = torch.empty(packer.nbytes, dtype=torch.uint8)
    packer.write(block)
    recipe = Recipe("load_diffusion_model", path, options or {}, file_stamp(path)).as_json()
    mirrors.load(Load(key=KEY, recipe=recipe, patches=tree, patches_uuid=uuid, **more), block, mesh)
    return mirrors.entries[KEY].patcher


def lora_of(patcher, path, strength=1.0):
    """Return a LoRA file as patches of a model."""
    keys = comfy.lora.model_lora_keys_unet(patcher.model, {})
    loaded = comfy.lora.load_lora(comfy.utils.load_torch_file(path), keys, log_missing=False)
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
        key=KEY, method="_forward", sequence=settings, ranks=mesh.size, batch_degree=1, leading=("x", "timestep"),
        in_place=("control",), memory_scale=1.0, compile=None, compile_or_raise=True, cancel_every=0,
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


def in_file(weights, inode):
    """Return the bytes of weights that are pages of a file which this process has mapped."""
    with open("/proc/self/maps") as lines:
        spans = [line.split()[0].split("-") for line in lines if line.split()[4] == str(inode)]
    ranges = [(int(low, 16), int(high, 16)) for low, high in spans]
    return sum(w.nbytes for w in weights if w.device.type == "cpu" and any(a <= w.data_ptr() < b for a, b in ranges))
