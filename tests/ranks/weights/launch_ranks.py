"""Rank script: sharded weights on fake CUDA devices, where NCCL keeps no order between groups. Rank 0 reports what overlaps.

Argument: "asks" leaves it to `RankGroup.may_overlap` whether weights travel beside tokens, "overlaps" has them do so in any case.
"""

import os

from support.ranks import finish, own_device, report, start

del os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"]
rank, world, (mode,) = start(cards=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from support.stand_in import messages  # noqa: E402

from cp_runtime.engine.ranks.collectives import RankGroup  # noqa: E402
from cp_runtime.engine.ranks.mesh import BatchMesh  # noqa: E402
from cp_runtime.engine.weights.sharded import ShardedWeights  # noqa: E402

device, mesh = own_device(), BatchMesh(dist.group.WORLD).sequence()
if mode == "overlaps":
    RankGroup.may_overlap = True
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to(device)


def gather_tokens(_, __, out):
    """What an attention does: an exchange of tokens, behind which a part of the next block's weights is asked for."""
    mesh.whole.all_gather([out], [1] * world, 0)
    weights.after_attention()


with torch.no_grad():
    x = torch.ones(1, 64, device=device)
    expected = model(x)
    weights = ShardedWeights(model, mesh.weights, device)
    for name in weights.blocks:
        weights.keep(name)
    for layer in model:
        layer.register_forward_hook(gather_tokens)
    messages.log.clear()
    for _ in range(2):  # the second call fetches ahead
        with weights.call():
            out = model(x)
report(
    equal=torch.equal(out, expected),
    groups=sorted({launch.group for launch in messages.log}),
    beside=sorted({launch.operation for launch in messages.log if launch.beside}),
)
finish()
