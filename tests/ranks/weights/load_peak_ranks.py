"""Rank script: the most memory of its own that a rank takes while it loads shared weights with a LoRA in them. Rank 0 reports.

Arguments: the folder of a model whose blocks have weights that the C library keeps on its heap.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from mirrors import KEY, load, lora_of, mirrors_on
from support.live_bytes import Peak
from support.ranks import finish, report, start

from cp_runtime.engine.ranks.mesh import BatchMesh
from cp_runtime.engine.weights.blocks import sizes_of

rank, world, (models,) = start()
torch.set_grad_enabled(False)
path = str(Path(models) / "diffusion_models" / "flux_many.safetensors")
mirrors = mirrors_on("cpu")
patcher = load(mirrors, path, mesh=BatchMesh(dist.group.WORLD), placement="sharded", device_bytes=1 << 20)
loras = [lora_of(path, str(Path(models) / "loras" / "flux_many_lora.safetensors"), strength) for strength in (1.0, 0.5)]
sizes = sizes_of(patcher.model.diffusion_model)
with Peak() as peak:
    for number, patcher.patches in enumerate(loras):
        patcher.patches_uuid = str(number)
        mirrors.to_device(mirrors.entries[KEY], 0)
report(peak=peak.bytes, bound=sizes.per_rank(world), whole=sizes.whole, patched=len(loras[0]))
finish()
