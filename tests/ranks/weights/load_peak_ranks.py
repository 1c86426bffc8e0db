"""Rank script: the most memory of its own that a rank takes while it loads shared weights with a LoRA in them. Rank 0 reports.

Arguments: the folder of a model whose blocks have weights that the C library keeps on its heap.
"""

import threading
import time
from pathlib import Path

from support.ranks import finish, report, start, use_comfyui

rank, world, (models,) = start()
use_comfyui()

import comfy.lora  # noqa: E402
import comfy.utils  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from cp_runtime.comfy.memory.rank_file_weights import LoadProgress  # noqa: E402
from cp_runtime.comfy.model.rank_mirrors import Mirrors  # noqa: E402
from cp_runtime.comfy.model.wire_recipe import Recipe, file_stamp  # noqa: E402
from cp_runtime.engine.mesh import BatchMesh  # noqa: E402
from cp_runtime.engine.weights.blocks import sizes_of  # noqa: E402
from cp_runtime.pool.messages import Load  # noqa: E402

torch.set_grad_enabled(False)
path = str(Path(models) / "diffusion_models" / "flux_many.safetensors")
peak, over = 0, threading.Event()


def private_bytes():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def look():
    global peak
    while not over.is_set():
        peak = max(peak, private_bytes())
        time.sleep(0.002)


mirrors = Mirrors(torch.device("cpu"), [], LoadProgress(lambda _: None))
recipe = Recipe("load_diffusion_model", path, {}, file_stamp(path)).as_json()
request = Load(key="k", recipe=recipe, patches=[], patches_uuid="none", placement="sharded", device_bytes=1 << 20)
mirrors.load(request, torch.empty(0, dtype=torch.uint8), BatchMesh(dist.group.WORLD))
patcher = mirrors.entries["k"].patcher
keys = comfy.lora.model_lora_keys_unet(patcher.model, {})
lora = comfy.utils.load_torch_file(str(Path(models) / "loras" / "flux_many_lora.safetensors"))
loaded = comfy.lora.load_lora(lora, keys, log_missing=False)
sizes, before = sizes_of(patcher.model.diffusion_model), private_bytes()
threading.Thread(target=look, daemon=True).start()
for strength in (1.0, 0.5):
    patcher.patches = {name: [(strength, patch, 1.0, None, None)] for name, patch in loaded.items()}
    patcher.patches_uuid = str(strength)
    mirrors.to_device(mirrors.entries["k"], 0)
over.set()
report(peak=peak - before, bound=sizes.per_rank(world), whole=sizes.whole, patched=len(loaded))
finish()
