"""Rank script: ComfyUI's own loader with a file that fits into memory, and with one that does not; and what counts as memory.

The file is small: how much memory is free is made up.
"""

import ctypes
import gc
import os
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from types import SimpleNamespace

import comfy.sd
import comfy.utils
import torch
from comfy import model_management as mm
from mirrors import flux_inputs, in_file, lora_of
from support.live_bytes import private_bytes
from support.ranks import finish, report, start

from cp_runtime.comfy.ui import files as host_memory
from cp_runtime.comfy.ui.recipes import watch_loaders
from cp_runtime.errors import ChangedFileError

_, _, (checkpoint, lora) = start()
torch.set_grad_enabled(False)
watch_loaders()
CPU = torch.device("cpu")
folder = Path(tempfile.mkdtemp())
model_file = folder / "model.safetensors"
shutil.copy(checkpoint, model_file)
whole = model_file.read_bytes()


def kept_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return private_bytes()


def load(*, fits, **options):
    host_memory.free_host_memory = lambda: 1 << 60 if fits else 0
    before = kept_bytes()
    patcher = comfy.sd.load_diffusion_model(str(model_file), options)
    return patcher, kept_bytes() - before


def of_file(patcher):
    """Bytes of weights that are pages of the file, and of all."""
    weights = list(patcher.model.diffusion_model.parameters())
    return in_file(weights, os.stat(model_file).st_ino), sum(w.nbytes for w in weights)


def call(patcher):
    return patcher.model.diffusion_model(**flux_inputs())


def life(patcher):
    """What a model gives through a LoRA in place, without it, unloaded, loaded again and saved."""
    outs = [call(patcher)]
    patched = patcher.clone()
    patched.add_patches({name: patch for name, ((_, patch, *_),) in lora_of(patcher, lora).items()}, 1.0)
    patched.weight_inplace_update = True
    mm.load_models_gpu([patched])
    outs.append(call(patched))
    patched.detach()
    mm.current_loaded_models.clear()
    outs.append(call(patcher))
    mm.load_models_gpu([patcher])
    outs.append(call(patcher))
    patcher.detach()
    mm.current_loaded_models.clear()
    saved = folder / "saved.safetensors"
    comfy.sd.save_checkpoint(str(saved), patcher, metadata={})
    return outs, comfy.utils.load_torch_file(str(saved))


def same(ones, others):
    (outs, saved), (other_outs, other_saved) = ones, others
    # CPU libraries add up in another order where weights lie at other addresses.
    differences = [(out - other).abs().max() / other.std() for out, other in zip(outs, other_outs, strict=True)]
    return [
        max(differences).item() <= 1e-5,
        saved.keys() == other_saved.keys() and all(torch.equal(saved[name], other_saved[name]) for name in saved),
        not torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]),
    ]


def cut(patcher):
    """What ComfyUI gets that is about to use a model whose file has become shorter."""
    os.truncate(model_file, len(whole) // 2)
    try:
        patcher.model.get_dtype()
    except ChangedFileError as error:
        return str(error)
    finally:
        model_file.write_bytes(whole)
    return ""


def limits(version, limit, used, files):
    """What is free in a control group with a limit, by its files."""
    group = folder / f"groups{version}" / ("memory" if version == 1 else "") / "docker" / "x"
    group.mkdir(parents=True)
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), 2: ("memory.max", "memory.current", "")}[version]
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\n{names[2]}active_file {files}\n{names[2]}inactive_file {files}\n")
    listed = folder / "listed"
    listed.write_text("3:cpu:/docker/x\n4:memory:/docker/x\n" if version == 1 else "0::/docker/x\n")
    stock, root = host_memory._VERSIONS, folder / f"groups{version}"
    host_memory._VERSIONS = tuple((root / own.relative_to(host_memory.GROUPS), *rest) for own, *rest in stock)
    try:
        return real_free_memory(str(listed))
    finally:
        host_memory._VERSIONS = stock


real_free_memory = host_memory.free_host_memory
report(
    step="memory",
    machine=real_free_memory("/proc/self/no such file") > 1 << 20,
    here=real_free_memory() > 1 << 20,
    limited=[limits(2, 1000, 700, 100), limits(1, 1000, 700, 100)],
    nothing_left=limits(2, 500, 900, 100) if shutil.rmtree(folder / "groups2") is None else None,
    unlimited=limits(1, 1 << 62, 700, 0) > 1 << 20 if shutil.rmtree(folder / "groups1") is None else None,
)
call(load(fits=True)[0])  # what libraries keep from their first use is no model's
stock, copied = load(fits=True)
mapped, kept = load(fits=False)
report(step="loaded", copied=copied, kept=kept, stock=of_file(stock), mapped=of_file(mapped))
report(step="life", same=same(life(stock), life(mapped)), file=model_file.read_bytes() == whole)
report(step="cut", stock=cut(stock), mapped=cut(mapped))
converted, _ = load(fits=False, dtype=torch.float8_e4m3fn)
report(step="converted", mapped=of_file(converted), dtype=str(converted.model.get_dtype()))
host_memory.comfy.memory_management.aimdo_enabled = True
with host_memory.weights_in_file(str(model_file)) as ours:
    report(step="DynamicVRAM", ours=ours)
host_memory.comfy.memory_management.aimdo_enabled = False
host_memory.sys = SimpleNamespace(platform="win32")
with host_memory.weights_in_file(str(model_file)) as ours:
    report(step="another system", ours=ours)
host_memory.sys = sys
model = weakref.ref(mapped.model)
del mapped
gc.collect()
report(step="dropped", alive=model() is not None)
model_file.write_bytes(whole[: len(whole) // 2])
told = []
for fits in (True, False):
    try:
        load(fits=fits)
    except Exception as error:  # noqa: BLE001  (whatever ComfyUI raises)
        told.append(f"{type(error).__name__}: {error}")
report(step="broken", told=told)
shutil.rmtree(folder)
finish()
