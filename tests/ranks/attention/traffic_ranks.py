"""Rank script: what crosses between the ranks in one attention, as torch's dispatcher sees it, and as this package counts it."""

import zlib
from unittest import mock

import torch
import torch.distributed as dist
from support.ranks import finish, report, start
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (makes torch know the backend)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cp_runtime.engine import measuring
from cp_runtime.engine.attention import ring
from cp_runtime.engine.attention.context_parallel import context_parallel_attention
from cp_runtime.engine.exchange import exchange
from cp_runtime.engine.ranks.config import ContextParallelConfig
from cp_runtime.engine.ranks.mesh import Groups, SequenceMesh, factors
from cp_runtime.engine.ranks.sharding import JointLayout

rank, world, _ = start()

HEADS, HEAD_DIM = 8, 16
mesh = SequenceMesh(dist.group.WORLD)


class Recorder(TorchDispatchMode):
    """Every operation of torch.distributed, the dtypes of its tensors, and the elements that it sends to each other rank; and every
    message through memory that ranks share.

    Only rank 0 reports, which is the first of every group.
    """

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            sent = {"alltoall_base_": lambda: args[4][1:], "send": lambda: [tensors[0].numel()]}.get(func._opname, list)()
            self.operations.append([func._opname, sorted({str(t.dtype) for t in tensors}), sent])
        return func(*args, **(kwargs or {}))

    def note(self, slot, at, nbytes, ranks, *_):
        self.operations.append(["memory", [str(torch.uint8)], [nbytes] * len(ranks)])


def noted(recorder, send=exchange.Exchange._send):
    def note_and_send(self, *args):
        recorder.note(*args)
        return send(self, *args)

    return note_and_send


def over_sockets():
    """The same ranks on a group that does not share memory."""
    with mock.patch.object(exchange, "connect", return_value=None):
        group = dist.new_group()
        made = SequenceMesh(group, Groups(group))
        axes = [axis for degrees in factors(world) for axis in made.axes(*degrees)]
        return made if all(axis.shared is None for axis in axes) else None


def measure(name, ring, ulysses, rotate_method, lengths, mesh=mesh):
    config = ContextParallelConfig(
        ring_degree=ring, ulysses_degree=ulysses, rotate_method=rotate_method, ulysses_anything=True, ring_anything=True
    )
    layout = JointLayout(lengths, world)
    q, k, v = torch.randn(3, 1, sum(lengths), HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    # Making and connecting groups is not part of an attention.
    through_memory = [axis.shared is not None for axis in mesh.axes(ring, ulysses) if axis.size > 1]
    mesh.stats.reset()
    recorder = Recorder()
    with torch.no_grad(), recorder, mock.patch.object(exchange.Exchange, "_send", noted(recorder)):
        context_parallel_attention(*(layout.take_local(t, rank, 1) for t in (q, k, v)), mesh=mesh, config=config, q_layout=layout)
    own_bytes = mesh.stats.bytes_sent
    sent = torch.tensor([float(own_bytes)])
    dist.all_reduce(sent)
    report(
        name=name,
        ring=ring,
        ulysses=ulysses,
        lengths=lengths,
        bytes=sent.item() / world,
        own_bytes=own_bytes,
        unit=sum(lengths) * HEADS * HEAD_DIM * 4,
        counts=dict(mesh.stats.counts),
        pending=mesh.stats.pending,
        operations=recorder.operations,
        through_memory=through_memory,
    )


sockets = over_sockets()
of_devices = SequenceMesh(dist.new_group(backend="fake"))  # a backend that is not gloo; it sends nothing
for lengths in [(16, 48), (5, 13)]:
    measure("ulysses of devices", 1, world, "allgather", lengths, of_devices)
    measure("ring of devices", world, 1, "alltoall", lengths, of_devices)
    for of, some in (("", mesh), (" over sockets", sockets)):
        measure("ulysses" + of, 1, world, "allgather", lengths, some)
        for method in ("alltoall", "allgather"):
            measure(f"ring {method}{of}", world, 1, method, lengths, some)
            if world == 4:
                measure(f"unified {method}{of}", 2, 2, method, lengths, some)


# Every rank knows the same numbers of all.
known = measuring.measure(mesh, torch.device("cpu"), f"card {rank % 2}", [""] * (world - 1) + ["pc2"])
sums = torch.tensor([float(zlib.crc32(repr(known).encode()))], dtype=torch.float64)
high, low = sums.clone(), sums.clone()
dist.all_reduce(high, dist.ReduceOp.MAX)
dist.all_reduce(low, dist.ReduceOp.MIN)
kinds = len(set(known.devices))
report(name="measured", same=high.item() == low.item(), ranks=len(known.each), kinds=kinds, inside=len(known.inside))


# An error while neighbours are still sending: it is known that something is under way.
def fail(q, k, v, index):
    raise ValueError("on purpose")


apart = SequenceMesh(dist.new_group())  # a group that is not used again
x = torch.zeros(1, 1, 2, 4)
try:
    ring.rotate(x, x, x, group=apart.axes(world, 1).ring, lengths=[2] * world, attend=fail, convert_to_fp32=True)
except ValueError:
    report(name="left", pending=apart.stats.pending)
finish()
