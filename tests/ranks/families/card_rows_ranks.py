"""Rank script: a VAE's layers on rows, on fake CUDA devices. Rank 0 reports what made a host wait for its device, on every rank."""

from support.ranks import finish, of_all, report, start

rank, world, _ = start(cards=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from support.stand_in import tensors  # noqa: E402
from torch import nn  # noqa: E402

from cp_runtime.engine.ranks.mesh import SequenceMesh  # noqa: E402
from cp_runtime.engine.rows.plan import RowPlan, run_on_rows  # noqa: E402

torch.cuda.set_device(rank)
torch.manual_seed(0)
layers = [nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 3, padding=1)]
vae = nn.Sequential(*layers, nn.GroupNorm(4, 8), nn.Conv2d(8, 3, 3, padding=1)).eval()
latent = torch.randn(1, 4, 7, 6)
hosts = dist.new_group(backend="gloo")
with torch.inference_mode():
    expected = vae(latent)
    vae.to("cuda")
    on_card = latent.to("cuda")
    tensors.waits.clear()
    out = run_on_rows(vae, RowPlan(family="", model_class=""), vae, on_card, mesh=SequenceMesh(dist.group.WORLD))
    waits = of_all([place for place in tensors.waits if ", cp_runtime/" in place], hosts)
    difference = (out.cpu() - expected).abs().max().item()
report(waits=waits, difference=difference)
finish()
