"""Rank script: every case of family_cases.py, sharded against the stock forward in one process; rank 0 reports."""

import importlib
import os
import sys
from pathlib import Path

from support.ranks import finish, report, start

rank, world, (ring, ulysses, rotate_method) = start()
sys.path[0] = os.environ["COMFYUI_PATH"]
sys.argv = ["main.py", "--cpu"]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True
import comfy.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from cp_runtime.comfy.attention import attention_override  # noqa: E402
from cp_runtime.config import ContextParallelConfig  # noqa: E402
from cp_runtime.families import plan_for  # noqa: E402
from cp_runtime.hooks import AppliedPlan  # noqa: E402
from cp_runtime.mesh import SequenceMesh  # noqa: E402

sys.path.append(str(Path(__file__).parent))
from family_cases import CASES, MODELS  # noqa: E402


def build(name):
    """A model whose weights make every token depend on every other one."""
    path, arguments = MODELS[name]
    module, _, cls = path.rpartition(".")
    model = getattr(importlib.import_module(module), cls)(
        **arguments, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in parameter_name and parameter.ndim == 1:
                parameter.copy_(1.5 + 0.1 * values)
            else:
                parameter.copy_(values / max(1, parameter.shape[-1]) ** 0.5 if parameter.ndim > 1 else 0.2 * values)
    return model.eval()


def clone(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list):
        return [clone(item) for item in value]
    return value


def forward(model, inputs, options):
    inputs = {name: clone(value) for name, value in inputs.items()}
    return model._forward(**inputs, transformer_options=options)


mesh = SequenceMesh(dist.group.WORLD)
config = ContextParallelConfig(
    ring_degree=int(ring), ulysses_degree=int(ulysses), rotate_method=rotate_method, ulysses_anything=True, ring_anything=True
)
models = {name: build(name) for name in sorted({case.model for case in CASES})}
applied = {name: AppliedPlan(model, plan_for(model), mesh, lambda shape: config) for name, model in models.items()}
with torch.inference_mode():
    for case in CASES:
        model, plan, inputs = models[case.model], applied[case.model], case.make()
        expected = forward(model, inputs, {})
        unmasked = (
            forward(model, {k: v for k, v in inputs.items() if k != "attention_mask"}, {}) if "attention_mask" in inputs else None
        )
        mesh.stats.reset()
        with plan.call() as state:
            out = forward(model, inputs, {"optimized_attention_override": attention_override(plan)})
            lengths = dict(state.lengths)
        worst = torch.tensor([(out - expected).abs().max().item()])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        report(
            case=case.name,
            difference=worst.item() / expected.std().item(),
            std=expected.std().item(),
            mask_matters=None if unmasked is None else (unmasked - expected).abs().max().item() / expected.std().item(),
            collectives=mesh.stats.collectives,
            counts=dict(mesh.stats.counts),
            lengths=lengths,
        )
    # Taken off, the model is the stock one again.
    for plan in applied.values():
        plan.remove()
    case = CASES[0]
    report(
        case="removed",
        difference=(forward(models[case.model], case.make(), {}) - forward(models[case.model], case.make(), {})).abs().max().item(),
        hooks=sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for model in models.values() for m in model.modules()),
    )
finish()
