"""Rank script: the cases of some families, sharded against the stock forward in one process; rank 0 reports.

Arguments: ring degree, Ulysses degree, rotate method, batch degree, and as JSON shares, the models whose weights are shared out,
too, (family, name) each, and the cases, (family, name) each.
"""

import json

import torch
import torch.distributed as dist
from family_stock import distance, models, stock
from sharded_call import call, in_mode, shared_out
from support import families
from support.ranks import finish, report, start, worst

from cp_runtime.comfy.shared import fingerprint
from cp_runtime.comfy.shared.fingerprint import classes_of, code_of
from cp_runtime.comfy.shared.objects import Settings, write
from cp_runtime.engine.hooks import InstalledPlan
from cp_runtime.engine.ranks.mesh import BatchMesh
from cp_runtime.families import plan_for
from cp_runtime.nested import difference as apart
from cp_runtime.nested import tensors

rank, world, (ring, ulysses, rotate_method, batch_degree, given, shared, wanted) = start()

wanted = {tuple(case) for case in json.loads(wanted)}
shared = {tuple(model) for model in json.loads(shared)}


mesh = BatchMesh(dist.group.WORLD, shares=tuple(json.loads(given)))
own, config, in_rounds = mesh.sequence().weights, *(in_mode(ring, ulysses, rotate_method, rounds) for rounds in (1, 2))
eight_bits = in_mode(ring, ulysses, rotate_method, exchange="8 bit")


def by_value(model):
    """What ranks would get of a model, without the weights and what calls leave in it."""
    return write(model, Settings(later=False)).data


def changes(code, data, model):
    """What is other than before in the code that a model computes with, or in the model."""
    names = fingerprint.differing(code.hashes, code_of(classes_of(model)).hashes)
    return [*names, *(["the model"] if by_value(model) != data else [])]


with torch.no_grad():
    for family in sorted({family for family, _ in wanted}):
        # Of rank 0, which reports them.
        watched = models(family) if rank == 0 else {}
        before = {name: (code_of(classes_of(model)), by_value(model)) for name, model in watched.items()}
        installed = {name: InstalledPlan(model, plan_for(model)) for name, model in models(family).items()}
        for case in families.load(family).CASES:
            if (family, case.name) not in wanted:
                continue
            model, plan, inputs = models(family)[case.model], installed[case.model], case.make()
            expected, others = stock(family, case.name)
            mesh.stats.reset()
            out, state = call(plan, inputs, case.options, mesh, config, batches=batch_degree)
            difference, std = distance(out, expected)
            report(
                family=family,
                case=case.name,
                difference=worst(difference),
                std=std,
                matters=others,
                collectives=mesh.stats.collectives,
                counts=dict(mesh.stats.counts),
                lengths=state.lengths,
            )
            if (family, case.model) not in shared:
                continue
            shared.remove((family, case.model))
            differing = []
            coded, _ = call(plan, inputs, case.options, mesh, eight_bits, batches=batch_degree)
            with shared_out(model, own) as weights:
                for same in (config, in_rounds):  # without knowing the order of blocks, and ahead of them
                    mesh.stats.reset()
                    again, _ = call(plan, inputs, case.options, mesh, same, batches=batch_degree, weights=weights)
                    differing += [distance(a, b)[0] for a, b in zip(tensors(again), tensors(out), strict=True)]
                report(
                    family=family,
                    case=f"weights of {case.model}",
                    blocks=len(weights.blocks),
                    differing=max(differing),
                    eight_bits=worst(apart(coded, out)),
                    pending=mesh.stats.pending,
                )

        # Taken off, the model is the stock one again, and nothing takes its calls for changes.
        for plan in installed.values():
            plan.remove()
        report(
            family=family,
            case="removed",
            hooks=sum(
                len(m._forward_hooks) + len(m._forward_pre_hooks) for model in models(family).values() for m in model.modules()
            ),
            changes=[change for name, model in watched.items() for change in changes(*before[name], model)],
        )
finish()
