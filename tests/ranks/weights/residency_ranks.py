"""Rank script: what ComfyUI's process gives back before ranks load its model, what ranks give back to it, and how many conditions
a sampler computes at once.

There is no accelerator: `meta` stands for its device, the controller notes what it is told, and DynamicVRAM is an object with its
two methods. Model, patchers and memory manager are ComfyUI's.
"""

import uuid
from types import SimpleNamespace

import comfy.samplers
import comfy.sd
import torch
from comfy import model_management as mm
from support import families
from support.models import build
from support.ranks import finish, report, start
from support.reports import call_report

from cp_runtime.comfy.rank.memory import available
from cp_runtime.comfy.ui import runtime as devices
from cp_runtime.comfy.ui.apply import apply_to_model, without_context_parallel
from cp_runtime.comfy.ui.interception import innermost_method, intercept, release
from cp_runtime.comfy.ui.notes import ON_RANKS, notes_of
from cp_runtime.comfy.ui.residency import free_for_ranks
from cp_runtime.comfy.ui.runtime import CONTROLLER
from cp_runtime.comfy.ui.stock_loads import _drop_from_ranks, watch_stock_loads
from cp_runtime.controller.placement import Shortages
from cp_runtime.controller.run_stats import CallRecord
from cp_runtime.controller.workers import Workers
from cp_runtime.pool.config import (
    DeviceInventory,
    RuntimeConfig,
    WorkerSite,
)

_, _, (checkpoint,) = start()
torch.set_grad_enabled(False)
META = torch.device("meta")
CUDA = DeviceInventory(type="cuda", count=4)
config = RuntimeConfig.resolve(inventory=DeviceInventory(type="cpu", count=0), world_size=2)
held, told = {}, []  # models on the ranks, by key


class Pages:
    """What DynamicVRAM keeps of a model on a device."""

    size = 100

    def loaded_size(self):
        return self.size

    def free_memory(self, nbytes):
        self.size -= nbytes


def load(config, target, node, cancelled):
    told.append("load")
    hold(target.key)


def hold(key, device_bytes=None):
    held[key] = SimpleNamespace(device_bytes=device_bytes or stock.model_size(), aside=False)


def unload(key):
    if held.pop(key, None) is not None:
        told.append("unload")


CONTROLLER.load, CONTROLLER.unload = load, unload
CONTROLLER.workers = SimpleNamespace(pool=SimpleNamespace(config=config), models=SimpleNamespace(held=held))
mm.soft_empty_cache = lambda force=False: told.append("empty cache")
watch_stock_loads()


def step(name, run):
    told.clear()
    run()
    report(
        step=name,
        told=list(told),
        weights=sorted({weight.device.type for weight in model.diffusion_model.parameters()}),
        pages=sum(pages.size for pages in getattr(model, "dynamic_vbars", {}).values()),
        listed=[type(loaded.model).__name__ for loaded in mm.current_loaded_models],
    )


stock = comfy.sd.load_diffusion_model(checkpoint, disable_dynamic=True)
model = stock.model
parallel = apply_to_model(stock, config)
step("ranks load", lambda: mm.load_models_gpu([parallel]))
step("ranks load again", lambda: mm.load_models_gpu([parallel]))
step("loaded without ranks", lambda: mm.load_models_gpu([stock]))
pages, module = Pages(), next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
model.dynamic_vbars = {META: pages}
module._v, module._v_signature = (pages, 0, 100), [1]
module._pins = {"weights": {"pin": torch.zeros(10), "registered": False, "balancer_entry": [0, 0, module]}}
pinned = (SimpleNamespace(truncate=lambda size, do_unregister: None), [(module, 0)], [0], [0], [1], {})
unused = {name: (None, [], [-1], [0], [0], {}) for name in ("patches", "weights-loaded", "patches-loaded")}
model.dynamic_pins = {META: {"weights": pinned, **unused}}
step("ranks load behind DynamicVRAM", lambda: mm.load_models_gpu([parallel]))
left = [name for name in ("_v", "_v_signature") if name in vars(module)]
report(step="left of DynamicVRAM", pages=pages.size, on_modules=left, pinned=len(pinned[1]))
removed = without_context_parallel(parallel)
step("Apply is removed", lambda: mm.load_models_gpu([removed]))
elsewhere = stock.clone()
elsewhere.load_device = torch.device("cuda:7")
hold(notes_of(model).key)
step("loaded on a device without a rank", lambda: _drop_from_ranks(elsewhere))
held.clear()

# --highvram: the loader puts the model on the device, and it is to stay there. Nothing can be read from this device.
stock_to = torch.nn.Module.to
torch.nn.Module.to = lambda module, device: module.to_empty(device=device) if device == "cpu" else stock_to(module, device)
fresh = comfy.sd.load_diffusion_model(checkpoint, disable_dynamic=True)
model = fresh.model
model.to(META)
fresh.offload_device = META
parallel = apply_to_model(fresh, config)
step("ranks load behind --highvram", lambda: mm.load_models_gpu([parallel]))

# What ComfyUI books of a model on this process's device, and what a clone takes there once it runs without ranks.
whole = stock.model_size()
elsewhere = apply_to_model(stock, RuntimeConfig.resolve(inventory=CUDA, devices="cuda:1,cuda:2"))
for applied in (stock.model, model):
    hold(notes_of(applied).key, whole // 2)
sizes = {"sharded": parallel.model_size(), "on other devices": elsewhere.model_size()}
notes_of(model).local = True
clone, removed = parallel.clone(), without_context_parallel(parallel.clone())
report(step="sizes", whole=whole, **sizes, clone_on_one_device=clone.model_size(), removed=removed.model_size())
notes_of(model).local = False
held.clear()

# A wrapper of a node pack may name all arguments of the forward.
sent = []
parallel.call_workers = sent.append
model.current_weight_patches_uuid = ON_RANKS
intercept(parallel, model.diffusion_model)
named = {"x": torch.zeros(1, 16, 8, 8), "timestep": torch.ones(1), "context": torch.zeros(1, 3, 64), "y": torch.zeros(1, 64)}
getattr(model.diffusion_model, innermost_method(model.diffusion_model))(**named)
report(step="called by keywords", sent=[[call.leading, str(call.device)] for call in sent])
release(model.diffusion_model)
del parallel.call_workers

# A second Apply Context Parallel, behind a node that cannot run on ranks.
blocked = parallel.clone()
blocked.add_weight_wrapper("diffusion_model.img_in.weight", lambda weight: weight)
one_device = RuntimeConfig.resolve(inventory=DeviceInventory(type="cpu", count=0), world_size=2, on_unsupported="single device")
report(step="applied again", kind=type(apply_to_model(blocked, one_device)).__name__)

# A rank has no memory left.
freed = []
for loaded in mm.current_loaded_models:
    loaded.currently_used = loaded.model is parallel  # as ComfyUI notes for devices that are no CPU
mm.free_memory = lambda nbytes, device, keep_loaded: freed.append(
    (str(device), [loaded.model is parallel for loaded in keep_loaded])
)
step("a rank has no memory left", lambda: free_for_ranks([*config.devices, "cuda:1"]))  # where this process holds nothing
report(step="freed", freed=freed)


# Two CFG halves on ranks with a made-up memory, in units of what a call with one half needs on one device.
def batches(rooms, inventory=CUDA, **inputs):
    inputs = inputs or {"world_size": len(rooms) or 2}
    parallel.cp_config = RuntimeConfig.resolve(inventory=inventory, **inputs)
    CONTROLLER.workers = workers = Workers(parallel.cp_config, WorkerSite(), lambda: None, Shortages(), CONTROLLER.times)
    workers.pool.alive = True
    if rooms:
        reports = [call_report(room=room and int(room * one)) for room in rooms]
        workers.last_call = CallRecord(seconds=1.0, reports=reports, pids=[], node=None)
    sizes = []

    def apply_model(x, timestep, **conditions):
        sizes.append(len(x))
        return x

    model.apply_model, model.current_patcher = apply_model, parallel
    conditions = [[{"model_conds": {}, "uuid": uuid.uuid4()}] for _ in range(2)]
    comfy.samplers.calc_cond_batch(model, conditions, latent, torch.ones(1), {})
    return sizes


latent = torch.zeros(1, 16, 8, 8)
one = model.memory_required(latent.shape)
mm.get_free_memory = lambda device=None, torch_free_too=False: int(3.1 * one)
first, cpu = batches([]), batches([None, None], DeviceInventory(type="cpu", count=0), world_size=2)
mm.get_free_memory = lambda device=None, torch_free_too=False: one  # what rank 0's cache leaves of its device to this process
report(
    step="halves at once",
    before_a_call=first,
    cpu_ranks=cpu,
    enough=batches([1.6, 1.6]),
    one_rank_has_less=batches([1.6, 1.4]),
    ranks_share_a_device=batches([1.6, 1.6], devices="cuda:0,cuda:0", backend="gloo"),
    more_ranks=batches([0.8] * 4),
)
model.diffusion_model = build(families.load("unet").MODELS["sd15"])
stock_inventory, devices.device_inventory = devices.device_inventory, lambda: DeviceInventory(type="cuda", count=2)
torch.cuda.can_device_access_peer = lambda *_: True
torch.cuda.get_device_properties = lambda index: SimpleNamespace(
    name=f"RTX {index + 3}090", total_memory=24 << 30, major=8, minor=6
)
report(step="devices", cuda=devices.found_devices()["devices"], ranks=devices.default_config().devices)
devices.device_inventory = stock_inventory
report(step="halves at once, UNet", enough=batches([1.6] * 4), less=batches([1.4] * 4))
mm.get_free_memory, mm.minimum_inference_memory = lambda device=None, torch_free_too=False: 100 << 20, lambda: 1 << 30
report(step="less free than ComfyUI keeps", available=available(torch.device("cuda", 3)))
finish()
