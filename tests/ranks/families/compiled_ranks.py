"""Rank script: models whose blocks are compiled, against their stock forward in one process; rank 0 reports.

Arguments: ring degree, Ulysses degree, rotate method, batch degree, backend, and as JSON the cases, (family, name) each.
"""

import json
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from family_stock import distance, forward, models, stock
from sharded_call import call, in_mode, shared_out
from support import families
from support.ranks import finish, report, start, worst

from cp_runtime.compat import compiler_counts
from cp_runtime.engine.compiled import CompiledBlocks, CompileSettings
from cp_runtime.engine.hooks import InstalledPlan
from cp_runtime.engine.ranks.mesh import BatchMesh
from cp_runtime.families import plan_for

rank, world, (ring, ulysses, rotate_method, batch_degree, backend, wanted) = start()
mesh = BatchMesh(dist.group.WORLD)
own, configs = mesh.sequence().weights, [in_mode(ring, ulysses, rotate_method, rounds) for rounds in (1, 2)]


def run(installed, inputs, options, expected, weights=None):
    """Largest difference of any rank from the stock forward, in standard deviations of that. Every second call in two rounds."""
    config = configs[0]
    configs.reverse()
    out, _ = call(installed, inputs, options, mesh, config, batches=batch_degree, weights=weights)
    return worst(distance(out, expected)[0])


def smaller(inputs):
    """The same call of another size: a narrower latent, and less text."""
    latent, changed = next(iter(inputs)), dict(inputs)
    changed[latent] = inputs[latent][..., :-2]
    changed |= {name: inputs[name][:, :-1] for name in ("context", "attention_mask") if inputs.get(name) is not None}
    return changed


def change_weights(model):
    """As a LoRA does it: another parameter in the same place, of the same numbers."""
    with torch.inference_mode(False):
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(parameter.detach().clone(), requires_grad=False))


with torch.no_grad():
    for family, name in json.loads(wanted):
        case = families.case(family, name)
        model, failures = models(family)[case.model], []
        inputs, expected = case.make(), stock(family, name)[0]
        other = smaller(inputs)
        third = smaller(other)
        other_expected, third_expected = forward(model, other, case.options), forward(model, third, case.options)
        installed = InstalledPlan(model, plan_for(model))
        blocks = CompiledBlocks(model, installed.plan, CompileSettings(backend=backend))
        blocks.failed = failures.append
        began, graphs, differences = time.perf_counter(), [compiler_counts()["graphs"]], {}

        def step(what, *call):
            differences[what] = run(installed, *call)  # noqa: B023  (called at once)
            graphs.append(compiler_counts()["graphs"])  # noqa: B023

        step("first", inputs, case.options, expected)
        seconds = time.perf_counter() - began
        step("second", inputs, case.options, expected)
        change_weights(model)
        step("other weights", inputs, case.options, expected)
        step("other size", other, case.options, other_expected)
        step("third size", third, case.options, third_expected)
        with shared_out(model, own) as weights:
            step("shared weights", inputs, case.options, expected, weights)
            step("shared weights, fetched ahead", inputs, case.options, expected, weights)
        report(
            family=family,
            case=name,
            differences=differences,
            graphs=[after - before for before, after in pairwise(graphs)],
            breaks=compiler_counts()["breaks"],
            kinds=blocks.kinds,
            left=blocks.left,
            failures=[str(failure) for failure in failures],
            seconds=seconds,
        )
        blocks.remove()
        installed.remove()
        report(family=family, case="removed", forwards=sum("forward" in vars(module) for module in model.modules()))
finish()
