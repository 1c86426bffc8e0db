"""Rank script: process groups of four ranks in every order in which a pool may need them. Rank 0 reports.

Argument: "fresh" makes new groups for every pair of steps, "once" keeps them through all steps.
"""

import itertools
from datetime import timedelta

import torch
import torch.distributed as dist
from support import operations
from support.ranks import finish, of_all, own_device, report, start
from torch.distributed.device_mesh import init_device_mesh

from cp_runtime.engine.attention.context_parallel import context_parallel_attention
from cp_runtime.engine.ranks.config import ContextParallelConfig
from cp_runtime.engine.ranks.mesh import BatchMesh, Groups, SequenceMesh
from cp_runtime.engine.ranks.sharding import JointLayout
from cp_runtime.engine.rows.plan import RowPlan, run_on_rows
from cp_runtime.engine.weights.sharded import ShardedWeights

rank, world, (mode,) = start()

TIMEOUT = timedelta(seconds=20)  # of every group: what waits for a rank that never comes ends the script
device = own_device()
torch.set_grad_enabled(False)
torch.manual_seed(0)
torch.backends.cudnn.allow_tf32 = False
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(device)  # large enough to be shared out
own = [dict(layer._parameters) for layer in model]
device_mesh = init_device_mesh(device.type, (1, 2, 2), mesh_dim_names=("ring", "ulysses", "data"))
vae, picture = torch.nn.Conv2d(1, 1, 3, padding=1).to(device), torch.randn(2, 1, 8, 3).to(device)
x = torch.randn(3, 64).to(device)
right, tokens = model(x), torch.randn(2, 12, 4, 8).to(device)
expected = torch.nn.functional.scaled_dot_product_attention(*[tokens.transpose(1, 2)] * 3).transpose(1, 2)


def attend(mesh, ring, ulysses, items=tokens, outs=expected):
    """Whether this rank's tokens attend as on one process."""
    layout = JointLayout((tokens.shape[1],), mesh.size)
    q = layout.take_local(items, mesh.rank, 1)
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, ulysses_anything=True, ring_anything=True)
    out = context_parallel_attention(q, q, q, mesh=mesh, config=config, q_layout=layout)
    return torch.allclose(out, layout.take_local(outs, mesh.rank, 1), atol=1e-5)


class Ranks:
    """One pool's groups and weights."""

    def __init__(self):
        self.mesh, self.weights = BatchMesh(dist.group.WORLD, groups=Groups(dist.group.WORLD, TIMEOUT)), None

    def on(self, count, groups, ring, ulysses):
        """A call on the first ranks, in batch groups."""
        first = self.mesh.first(count)
        if first is None:
            return True
        index = slice(first.index(groups), first.index(groups) + 1) if groups > 1 else slice(None)
        return attend(first.sequence(groups), ring, ulysses, tokens[index], expected[index])

    def small(self):
        return self.on(2, 1, 1, 2)

    def three(self):
        return self.on(3, 1, 3, 1)

    def halves(self):
        return self.on(4, 2, 1, 2)

    def alone(self):
        return attend(self.mesh.alone, 1, 1)

    def degrees(self):
        return attend(self.mesh.sequence(), 2, 2)

    def load(self, mesh=None):
        self.unload()
        self.weights = ShardedWeights(model, (mesh or self.mesh.sequence()).weights, device)
        for name in self.weights.blocks:
            self.weights.keep(name)
        with self.weights.call():
            return torch.equal(model(x), right)

    def load_rows_of_a_device_mesh(self):
        return self.load(SequenceMesh.from_device_mesh(device_mesh))

    def unload(self):
        if self.weights is not None:
            self.weights.remove()
            self.weights = None
            for layer, parameters in zip(model, own, strict=True):
                layer._parameters.update(parameters)
        return True

    def rows(self):
        sequence = self.mesh.sequence(2)
        part = picture[self.mesh.index(2) :][:1]
        return torch.allclose(run_on_rows(vae, RowPlan(family="", model_class=""), vae, part, mesh=sequence), vae(part), atol=1e-6)


STEPS = [name for name in vars(Ranks) if name not in ("on",) and not name.startswith("_")]


def every_pair(steps):
    """A walk through every ordered pair of steps: an Euler circuit of the complete graph with loops."""
    walk = []
    for i, first in enumerate(steps):
        walk.append(first)
        walk += itertools.chain.from_iterable((first, second) for second in steps[i + 1 :])
    return [*walk, steps[0]]


walks = [every_pair(STEPS)] if mode == "once" else [list(pair) for pair in itertools.permutations(STEPS, 2)]
wrong, log = [], operations.record()
for walk in walks:
    ranks = Ranks()
    wrong += [f"{step} in {walk}" for step in walk if not getattr(ranks, step)()]
    ranks.unload()
    made = sum(group is not None for group in ranks.mesh._groups._made.values())
own_log = log.copy()
logs = of_all(own_log, dist.new_group(backend="gloo"))
pair = dist.new_group([0, 1])
if rank < 2:  # the others do not come, and need not: a mesh of some ranks makes no group
    apart = SequenceMesh(pair)
    wrong += [] if apart.weights is apart.whole else ["weights of some ranks"]
kinds = sorted({entry[2] for entry in own_log if not entry[2].startswith("groups")})
report(mode=mode, wrong=wrong, groups=made, disagreements=operations.disagreements(logs), kinds=kinds)
finish()
