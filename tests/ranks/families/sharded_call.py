"""A call of a family's model on the ranks of a script, as a pool makes it; `family_stock` has what it is compared with."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from family_stock import clone

from cp_runtime.comfy.rank.batch import share_out, take_items
from cp_runtime.comfy.rank.forward import run_sharded, run_staged
from cp_runtime.comfy.ui.interception import innermost_method
from cp_runtime.engine.ranks.config import ContextParallelConfig
from cp_runtime.engine.weights.sharded import ShardedWeights


def in_mode(ring, ulysses, rotate_method="allgather", rounds=1, exchange="exact"):
    """The degrees of all calls, for tokens and heads of any number."""
    return ContextParallelConfig(
        ring_degree=int(ring), ulysses_degree=int(ulysses), rotate_method=rotate_method, ulysses_anything=True, ring_anything=True,
        ulysses_rounds=rounds, exchange=exchange,
    )  # fmt: skip


def call(installed, inputs, options, mesh, config, *, batches=1, weights=None):
    """The whole output, and the state of the call on this rank: the batch is shared out over so many groups where it may be."""
    method = getattr(installed.model, innermost_method(installed.model))
    leading = list(inspect.signature(method).parameters)[:2]
    arguments = {**clone(inputs), "transformer_options": clone(dict(options))}
    degree = int(batches) if installed.plan.batch_is_shared(arguments) else 1
    shares = share_out(arguments, leading, mesh.size, degree, installed.plan.shares_sequence, mesh.group_shares)
    part = take_items(shares, arguments, mesh.index(shares.groups))
    out, state = run_sharded(installed, method, clone(part), mesh.sequence(shares.groups), lambda shape: config, weights=weights)
    return mesh.gather(shares, out), state


def staged_call(installed, pipeline, inputs, options, mesh, settings, batches=1):
    """The whole output of a call in stages, right on rank 0, whose batch passes through the stages one item after the other."""
    method = getattr(installed.model, innermost_method(installed.model))
    leading = list(inspect.signature(method).parameters)[:2]
    arguments = {**clone(inputs), "transformer_options": clone(dict(options))}
    apart = installed.plan.batch_is_shared(arguments)
    degree = int(batches) if apart else 1
    own = mesh.stage(settings.stages).ranks
    shares = share_out(arguments, leading, own.size, degree, installed.plan.shares_sequence, own.group_shares)
    part = take_items(shares, arguments, own.index(shares.groups))
    config = in_mode(1, own.sequence(shares.groups).size)
    out, _ = run_staged(
        installed, pipeline, method, part, own.sequence(shares.groups), lambda shape: config, settings, leading, apart
    )
    return own.gather(shares, out)


@contextmanager
def shared_out(model, group) -> Iterator[ShardedWeights]:
    """Every rank keeps its part of the blocks' weights; afterwards the model has them again."""
    whole = [dict(module._parameters) for module in model.modules()]
    weights = ShardedWeights(model, group, torch.device("cpu"))
    for name in weights.blocks:
        weights.keep(name)
    try:
        yield weights
    finally:
        weights.remove()
        for module, parameters in zip(model.modules(), whole, strict=True):
            module._parameters.update(parameters)
