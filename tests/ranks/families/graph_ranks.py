"""Rank script: a sharded forward of Flux recorded as a CUDA graph, on fake CUDA devices with a stand-in for NCCL, one per rank.

Rank 0 reports for every step the largest difference of a result from the plain call with the same numbers, what every rank told,
and how many collectives and bytes it counted.
Arguments: ring degree, Ulysses degree, rotate method.
"""

import os
from contextlib import contextmanager

os.environ["MKL_CBWR"] = "COMPATIBLE"  # the same bits, wherever numbers lie

from support.ranks import finish, of_all, report, start, use_comfyui

rank, world, (ring, ulysses, rotate_method) = start(cards=True)
use_comfyui()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from family_stock import models  # noqa: E402
from sharded_call import in_mode  # noqa: E402
from support import families  # noqa: E402
from support.stand_in import graphs as fake  # noqa: E402
from support.stand_in import messages  # noqa: E402

from cp_runtime.comfy.rank.forward import run_sharded  # noqa: E402
from cp_runtime.comfy.ui.interception import innermost_method  # noqa: E402
from cp_runtime.engine.graphs import Graphs  # noqa: E402
from cp_runtime.engine.hooks import InstalledPlan  # noqa: E402
from cp_runtime.engine.ranks.mesh import BatchMesh  # noqa: E402
from cp_runtime.families import plan_for  # noqa: E402
from cp_runtime.nested import map_tensors, tensors  # noqa: E402
from cp_runtime.pool.tensor_cache import owned  # noqa: E402

mesh, hosts = BatchMesh(dist.group.WORLD), dist.new_group(backend="gloo")
case = families.case("flux", next(each.name for each in families.load("flux").CASES))
model = models("flux")[case.model].to("cuda")
plan = InstalledPlan(model, plan_for(model))
config = in_mode(ring, ulysses, rotate_method, 2)
card = torch.device("cuda", rank)
largest = 0.0
counts = []


def run(arguments):
    out, state = run_sharded(plan, getattr(model, innermost_method(model)), arguments, mesh.sequence(), lambda shape: config)
    return out, state.tokens()


def own(arguments):
    return owned(arguments, card)


def given(number, times=1):
    """Arguments as a message brings them, on the host; `times` as many rows of the picture."""
    made = {**case.make(), "transformer_options": {**case.options, "sigmas": torch.full((1,), float(number))}}
    changed = map_tensors(made, lambda tensor: tensor + 0.1 * number if tensor.is_floating_point() else tensor)
    latent = next(iter(changed))
    changed[latent] = torch.cat([changed[latent]] * times, 2)
    return changed


def call(graphs, number, times=1):
    """A call, beside a plain one."""
    global largest
    arguments = given(number, times)
    expected, tokens = run(own(arguments))
    before, bytes_before = mesh.stats.collectives, mesh.stats.bytes_sent
    messages.log.clear()
    out, told = graphs.call("key", arguments, own, run, mesh.whole, 1.0)
    sent = mesh.stats.collectives - before, mesh.stats.bytes_sent - bytes_before
    assert told == tokens
    pairs = zip(tensors(out), tensors(expected), strict=True)
    largest = max([largest, *(float("inf") if torch.isnan(a).any() else float((a - b).abs().max()) for a, b in pairs)])
    counts.append(sent)
    return graphs.told


def step(name, what):
    """Report a step: what every rank was told in each of its calls."""
    global largest
    largest = 0.0
    counts.clear()
    told = [call(*each) if isinstance(each, tuple) else each() for each in what]
    every = of_all([each for each in told if each is not None], hosts)
    report(step=name, told=every, difference=max(of_all(largest, hosts)), counts=list(counts), order=order())


def order():
    return messages.disagreement(of_all(messages.log, hosts))


def move_a_weight():
    if rank == 1:  # the others do not know
        layer = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
        layer.weight = torch.nn.Parameter(layer.weight.clone(), requires_grad=False)


def fault(what):
    def arm():
        os.environ[fake.FAULT] = what

    return arm


def record_nothing():
    torch.cuda.mem_get_info, keep[0] = (lambda device=None: (0, 1 << 30)), torch.cuda.mem_get_info


def record_again():
    torch.cuda.mem_get_info = keep[0]


@contextmanager
def adding_what_is_kept():
    """A layer adds numbers from before the call."""
    kept = torch.zeros(1, device=card)
    layer = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    handle = layer.register_forward_hook(lambda module, inputs, out: out + kept)
    yield
    handle.remove()


keep = [None]
with torch.no_grad():
    graphs = Graphs(model, card)
    step("replayed", [(graphs, number) for number in range(6)])
    step("another size", [(graphs, number, 2) for number in range(4)] + [(graphs, 7)])
    step("weights moved on one rank", [move_a_weight] + [(graphs, number) for number in range(4)])
    step("dropped on one rank", [graphs.drop if rank == 0 else lambda: None] + [(graphs, number) for number in range(4)])
    step("without memory", [graphs.drop, record_nothing, (graphs, 1), record_again, (graphs, 2), (graphs, 3), (graphs, 4)])
    other = Graphs(model, card)
    step("recording fails on one rank", [fault("end 1"), *((other, number) for number in range(4)), fault("")])
    step("it stays so", [(other, 5), (other, 1, 2)])
    keeping = Graphs(model, card)
    with adding_what_is_kept():
        step("a model that keeps numbers", [(keeping, number) for number in range(4)])
    third = Graphs(model, card)
    step("a replay differs on one rank", [fault("differ 1"), *((third, number) for number in range(5)), fault("")])
finish()
