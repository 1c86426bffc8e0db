"""Rank script: weights that the loader converts, on a fake CUDA device, against the same model as ComfyUI alone loads it.

Arguments: checkpoint, LoRA, and JSON of the loader's options. It reports every step of a model's life: which weights and outputs
have other bits than ComfyUI's, and how many bytes of weights lie where.
"""

import json

from support.ranks import finish, report, start, use_comfyui

_, _, (checkpoint, lora, options) = start(cards=True)
use_comfyui()

import comfy.lora  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import torch  # noqa: E402
from comfy import model_management as mm  # noqa: E402

from cp_runtime.comfy.memory.rank_file_weights import LoadProgress  # noqa: E402
from cp_runtime.comfy.model.rank_mirrors import Mirrors  # noqa: E402
from cp_runtime.comfy.model.wire_recipe import Recipe, file_stamp  # noqa: E402
from cp_runtime.engine.weights.cast import CastWeight, plain  # noqa: E402
from cp_runtime.pool.messages import Load  # noqa: E402

torch.set_grad_enabled(False)
CARD = torch.device("cuda", 0)
mm.EXTRA_RESERVED_VRAM = 0
mm.minimum_inference_memory = lambda: 0
mm.vram_state = mm.VRAMState.NORMAL_VRAM
mm.lowvram_available, mm.MIN_WEIGHT_MEMORY_RATIO = True, 0.0  # as with a GPU of NVIDIA
mm.get_free_memory = lambda device=None, torch_free_too=False: (1 << 40, 0) if torch_free_too else 1 << 40

mirrors = Mirrors(CARD, [], LoadProgress(lambda _: None))
recipe = Recipe("load_diffusion_model", checkpoint, json.loads(options), file_stamp(checkpoint)).as_json()
mirrors.load(Load(key="k", recipe=recipe, patches=[], patches_uuid="none"), torch.empty(0, dtype=torch.uint8))
mirror = mirrors.entries["k"]
ours = mirror.patcher
dtypes = {name: getattr(torch, value) for name, value in json.loads(options).items()}
stock = comfy.sd.load_diffusion_model(checkpoint, dtypes, disable_dynamic=True)
ours.load_device = stock.load_device = CARD
keys = comfy.lora.model_lora_keys_unet(stock.model, {})
loaded = comfy.lora.load_lora(comfy.utils.load_torch_file(lora), keys, log_missing=False)


def patch(uuid, strength):
    for patcher in (ours, stock):
        patcher.patches = {name: [(strength, each, 1.0, None, None)] for name, each in loaded.items()} if strength else {}
        patcher.patches_uuid = uuid


def output(patcher):
    model = patcher.model.diffusion_model
    dtype = patcher.model.manual_cast_dtype or patcher.model.get_dtype()
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (1, 16, 6, 10), "context": (1, 11, 64), "y": (1, 64)}
    made = {name: torch.randn(shape, generator=generator).to(CARD, dtype) for name, shape in shapes.items()}
    for module in model.modules():  # what is not in the file
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(CARD))
    with torch.inference_mode():
        return model(
            **made, timestep=torch.tensor([0.5], device=CARD, dtype=dtype), guidance=torch.tensor([3.5], device=CARD, dtype=dtype)
        )


def same(one, other):
    ones, others = (plain(tensor).cpu() for tensor in (one, other))
    return one.device == other.device and one.dtype == other.dtype and torch.equal(ones.view(torch.uint8), others.view(torch.uint8))


def step(name, computes=True):
    weights, others = (dict(patcher.model.diffusion_model.named_parameters()) for patcher in (ours, stock))
    report(
        step=name,
        differing=[path for path, weight in weights.items() if not same(weight, others[path])],
        same_output=same(output(ours), output(stock)) if computes else True,
        on_device=sum(weight.nbytes for weight in weights.values() if weight.device == CARD),
        on_host=sum(weight.nbytes for weight in weights.values() if weight.device != CARD),
        in_file=sum(w.nbytes for w in weights.values() if isinstance(w, CastWeight) and w.held.dtype != w.dtype),
        whole=ours.model_size(),
        told=ours.loaded_size() == stock.loaded_size(),
    )


def load():
    mirrors.to_device(mirror, 0)
    mm.load_models_gpu([stock])


step("as loaded", computes=False)
load()
step("on the device")
for number, strength in enumerate((1.0, 0.5, 0.0)):
    patch(str(number), strength)
    load()
    step(f"LoRA {strength}")
patch("with a LoRA", 1.0)
load()
for patcher in (ours, stock):
    patcher.partially_unload(torch.device("cpu"), ours.model_size() // 2)
step("half of it makes room")
for patcher in (ours, stock):
    patcher.detach()
mm.current_loaded_models.clear()
step("evicted", computes=False)
for patcher in (ours, stock):
    patcher.partially_load(CARD, ours.model_size() // 2)
step("half of it has room")
finish()
