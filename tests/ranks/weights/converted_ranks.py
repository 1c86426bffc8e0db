"""Rank script: weights that the loader has converted, on a fake CUDA device, against the same model as ComfyUI alone loads it.

Arguments: checkpoint, LoRA, and JSON of the loader's options. It reports every step of a model's life: which weights and outputs
have other bits than ComfyUI's, and how many bytes of weights lie where.
"""

import json

from support.ranks import finish, report, start, use_comfyui

_, _, (checkpoint, lora, options) = start(cards=True)
use_comfyui()

import torch  # noqa: E402
from comfy import model_management as mm  # noqa: E402
from mirrors import KEY, as_mapped, flux_inputs, load, lora_of, make_up_memory, mirrors_on, new_stock, sent  # noqa: E402

torch.set_grad_enabled(False)
CARD = torch.device("cuda", 0)
make_up_memory(lambda: 1 << 40)
mirrors = mirrors_on(CARD)
options = json.loads(options)
ours, stock = load(mirrors, checkpoint, options), new_stock(checkpoint, **options)
del stock.model.model_sampling  # which has a table, and which ranks do without
stock.size = 0
inodes = sent(checkpoint, **options).inodes
ours.load_device = stock.load_device = CARD


def patch(uuid, strength):
    patches = lora_of(checkpoint, lora, strength, options) if strength else {}
    for patcher in (ours, stock):
        patcher.patches = patches
        patcher.patches_uuid = uuid


def output(patcher):
    model = patcher.model.diffusion_model
    for module in model.modules():  # what is not in the file
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(CARD))
    with torch.inference_mode():
        return model(**flux_inputs(patcher.model.manual_cast_dtype or patcher.model.get_dtype(), CARD))


def same(one, other):
    ones, others = (tensor.cpu() for tensor in (one, other))
    return one.device == other.device and one.dtype == other.dtype and torch.equal(ones.view(torch.uint8), others.view(torch.uint8))


def step(name, computes=True):
    weights, others = (dict(patcher.model.diffusion_model.named_parameters()) for patcher in (ours, stock))
    report(
        step=name,
        differing=[path for path, weight in weights.items() if not same(weight, others[path])],
        same_output=same(output(ours), output(stock)) if computes else True,
        on_device=sum(weight.nbytes for weight in weights.values() if weight.device == CARD),
        on_host=sum(weight.nbytes for weight in weights.values() if weight.device != CARD),
        common=as_mapped(weights.values(), inodes),
        whole=ours.model_size(),
        told=ours.loaded_size() == stock.loaded_size(),
    )


def load_both():
    mirrors.to_device(mirrors.entries[KEY], 0)
    mm.load_models_gpu([stock])


step("as loaded", computes=False)
load_both()
step("on the device")
for number, strength in enumerate((1.0, 0.5, 0.0)):
    patch(str(number), strength)
    load_both()
    step(f"LoRA {strength}")
patch("with a LoRA", 1.0)
load_both()
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
