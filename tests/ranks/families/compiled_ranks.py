"""Rank script: models whose blocks are compiled, against their stock forward in one process; rank 0 reports.

Arguments: ring degree, Ulysses degree, rotate method, batch degree, backend, and as JSON the cases, (family, name) each.
"""

import inspect
import json
import time
from itertools import pairwise

from support.ranks import finish, report, start, use_comfyui

rank, world, (ring, ulysses, rotate_method, batch_degree, backend, wanted) = start()
use_comfyui()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from family_stock import clone, distance, forward, models, stock  # noqa: E402
from support import families  # noqa: E402

from cp_runtime.comfy.forward.rank_batch import share_out  # noqa: E402
from cp_runtime.comfy.forward.rank_sharded import run_sharded  # noqa: E402
from cp_runtime.comfy.forward.ui_interception import innermost_method  # noqa: E402
from cp_runtime.compat import compiler_counts  # noqa: E402
from cp_runtime.engine.compiled import CompiledBlocks, CompileSettings  # noqa: E402
from cp_runtime.engine.config import ContextParallelConfig  # noqa: E402
from cp_runtime.engine.hooks import InstalledPlan  # noqa: E402
from cp_runtime.engine.mesh import BatchMesh  # noqa: E402
from cp_runtime.engine.weights.sharded import ShardedWeights  # noqa: E402
from cp_runtime.families import plan_for  # noqa: E402

mesh = BatchMesh(dist.group.WORLD)
own = mesh.sequence().weights
config = ContextParallelConfig(
    ring_degree=int(ring), ulysses_degree=int(ulysses), rotate_method=rotate_method, ulysses_anything=True, ring_anything=True
)


def run(installed, inputs, options, expected, weights=None):
    """Largest difference of any rank from the stock forward, in standard deviations of that."""
    method = getattr(installed.model, innermost_method(installed.model))
    leading = list(inspect.signature(method).parameters)[:2]
    degree = int(batch_degree) if installed.plan.batch_is_shared(inputs) else 1
    shares = share_out(inputs, leading, world, degree, installed.plan.shares_sequence)
    arguments = {**clone(inputs), "transformer_options": clone(dict(options))}
    sequence = mesh.sequence(shares.groups)
    part = shares.take(arguments, rank // sequence.size)
    out, _ = run_sharded(installed, method, clone(part), sequence, lambda shape: config, weights=weights)
    worst = torch.tensor([distance(shares.gather(out, mesh), expected)[0]])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


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
        (case,) = [case for case in families.load(family).CASES if case.name == name]
        model, failures = models(family)[case.model], []
        inputs, expected = case.make(), stock(family, name)[0]
        other = smaller(inputs)
        other_expected = forward(model, other, case.options)
        installed, own_weights = InstalledPlan(model, plan_for(model)), [dict(module._parameters) for module in model.modules()]
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
        weights = ShardedWeights(model, own, torch.device("cpu"))
        for path in weights.blocks:
            weights.keep(path)
        step("shared weights", inputs, case.options, expected, weights)
        step("shared weights, fetched ahead", inputs, case.options, expected, weights)
        weights.remove()
        for module, parameters in zip(model.modules(), own_weights, strict=True):
            module._parameters.update(parameters)
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
