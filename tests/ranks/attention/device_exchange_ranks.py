"""Rank script: attention between fake CUDA devices (`support/stand_in`) through shared memory, beside that of CPU ranks."""

import torch
import torch.distributed as dist
from support.ranks import finish, of_all, report, start
from support.stand_in import pinned, tensors

from cp_runtime.engine.attention.context_parallel import context_parallel_attention
from cp_runtime.engine.exchange import copies, exchange
from cp_runtime.engine.ranks.config import ContextParallelConfig
from cp_runtime.engine.ranks.mesh import Groups, SequenceMesh
from cp_runtime.engine.ranks.sharding import JointLayout

rank, world, _ = start(cards=True)
torch.set_grad_enabled(False)
exchange.PIECE = 1 << 10  # bytes
hosts = dist.new_group(backend="gloo")
mesh = SequenceMesh(hosts, Groups(hosts))


def attend(place, lengths, degrees, rounds, seed):
    layout, (ring, ulysses, method) = JointLayout(lengths, world), degrees
    config = ContextParallelConfig(
        ring_degree=ring,
        ulysses_degree=ulysses,
        rotate_method=method,
        ulysses_anything=True,
        ring_anything=True,
        ulysses_rounds=rounds,
    )
    whole = torch.randn(3, 2, sum(lengths), 6, 16, generator=torch.Generator().manual_seed(seed))
    local = [layout.take_local(each, rank, 1).to(place) for each in whole]
    return context_parallel_attention(*local, mesh=mesh, config=config, q_layout=layout).cpu()


differences, cases = [], [(world, 1, "alltoall"), (world, 1, "allgather"), (1, world, "alltoall")]
waits = []
for seed, lengths in enumerate([(64,), (5, 13), (3,), (300,)]):
    for degrees in cases:
        for rounds in (1, 3):
            expected = attend("cpu", lengths, degrees, rounds, seed)
            tensors.waits.clear()
            out = attend(torch.device("cuda"), lengths, degrees, rounds, seed)
            differences.append((out - expected).abs().max().item() if out.numel() else 0.0)
            # The thread of copies waits, and the driver lets go of memory that is too small: also when a rank runs ahead.
            waits += [
                place
                for place in tensors.waits
                if "cp_runtime/" in place and "/copies.py" not in place and "/pinned.py" not in place
            ]

own = exchange.exchange_of(hosts)
size = own.segments[rank].size
own.trim()  # the driver has the pages: others would be in their place
kept = own.segments[rank].size == size and pinned.stats()["registered_bytes"] > 0


def fails():
    raise OSError("the other one is gone")


at_fault, card = copies.DeviceCopies(torch.device("cuda", torch.cuda.current_device())), torch.ones(4, device="cuda")
at_fault.then(at_fault.start(torch.zeros(4), card, at_fault.mark()), fails)
while at_fault._error is None:
    pass
try:
    at_fault.start(torch.zeros(4), card, at_fault.mark())
    said = ""
except RuntimeError as error:
    said = f"{error}: {error.__cause__}"

report(
    difference=max(max(each) for each in of_all(differences, hosts)),
    waits=of_all(waits, hosts),
    kept=of_all(kept, hosts),
    said=said,
)
finish()
