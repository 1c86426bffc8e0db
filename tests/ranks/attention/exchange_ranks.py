"""Rank script: attention of four ranks through shared memory, over sockets, and, with two of them on another computer, both."""

import torch
import torch.distributed as dist
from support.ranks import finish, of_all, report, start

from cp_runtime.engine.attention import context_parallel
from cp_runtime.engine.exchange import exchange
from cp_runtime.engine.ranks.config import ContextParallelConfig
from cp_runtime.engine.ranks.mesh import Groups, SequenceMesh
from cp_runtime.engine.ranks.sharding import JointLayout
from cp_runtime.system import system

rank, world, _ = start()
torch.set_grad_enabled(False)
connect, host_id = exchange.connect, system.host_id

LENGTHS = [(64,), (5, 13), (3,)]  # even, uneven, too few for all
HEADS, HEAD_DIM = 6, 16  # ranks get different numbers of heads
strides = set()  # of keys and values in an attention


def mesh_of(connect=connect, host_id=host_id):
    """A mesh on groups of its own, made while functions of the exchange are replaced."""
    before = exchange.connect, system.host_id
    exchange.connect, system.host_id = connect, host_id
    group = dist.new_group()
    mesh = SequenceMesh(group, Groups(group))
    for degrees in ((4, 1), (2, 2), (1, 4)):
        for axis in mesh.axes(*degrees):
            axis.largest(torch.zeros(1))
            axis.all_gather([torch.zeros(1, 1)], [1] * axis.size, 0)
    exchange.connect, system.host_id = before
    return mesh


meshes = {
    "shared": mesh_of(),
    "sockets": mesh_of(connect=lambda group: None),
    "two computers": mesh_of(host_id=lambda: rank // 2),
}


def noted(attention):
    def note(q, k, v, *more, **options):
        strides.update(tensor.stride()[2:] for tensor in (k, v))
        return attention(q, k, v, *more, **options)

    return note


own_sdpa, context_parallel.attend_with_lse = context_parallel.sdpa, noted(context_parallel.attend_with_lse)
context_parallel.sdpa = lambda *options: noted(own_sdpa(*options))


def attend(mesh, ring, ulysses, method, lengths, shares=()):
    layout = JointLayout(lengths, world)
    config = ContextParallelConfig(
        ring_degree=ring, ulysses_degree=ulysses, rotate_method=method, ulysses_anything=True, ring_anything=True, ulysses_rounds=2
    )
    q, k, v = torch.randn(3, 2, sum(lengths), HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    local = [layout.take_local(tensor, rank, 1) for tensor in (q, k, v)]
    mesh.stats.reset()
    out = context_parallel.context_parallel_attention(*local, mesh=mesh, config=config, q_layout=layout)
    sent = of_all(dict(mesh.stats.bytes))  # over sockets, a ring passes on what others have sent
    total = {kind: sum(each[kind] for each in sent) for kind in sent[0]}
    return out, total, dict(mesh.stats.counts), mesh.stats.pending


wrong, by_head = [], []
for lengths in LENGTHS:
    for degrees in ((4, 1, "alltoall"), (4, 1, "allgather"), (2, 2, "alltoall"), (2, 2, "allgather"), (1, 4, "alltoall")):
        expected, *counted = attend(meshes["sockets"], *degrees, lengths)
        for name, mesh in meshes.items():
            strides.clear()
            out, *figures = attend(mesh, *degrees, lengths)
            by_head += [strides <= {(HEAD_DIM, 1)}] if name == "shared" else []
            wrong += [] if torch.equal(out, expected) and figures == counted else [(name, lengths, degrees, figures, counted)]

sizes, sent = [], 0
for _ in range(20):
    for degrees in ((4, 1, "alltoall"), (2, 2, "alltoall"), (1, 4, "alltoall")):
        _, moved, _, _ = attend(meshes["shared"], *degrees, LENGTHS[0])
        sent += sum(moved.values())
    sizes.append(sum(each.segments[each.rank].size for each in exchange._exchanges.values() if each is not None))


def kinds(mesh):
    axes = {"ring": mesh.axes(2, 2).ring, "ulysses": mesh.axes(2, 2).ulysses, "whole": mesh.whole}
    return {name: axis.shared is not None for name, axis in axes.items()}


used = {name: kinds(mesh) for name, mesh in meshes.items()}
wrong = [each for ranks in of_all(wrong) for each in ranks]
report(wrong=wrong, by_head=of_all(by_head), grew=of_all(sizes[-1] - sizes[2]), sent=sent, used=of_all(used))
finish()
