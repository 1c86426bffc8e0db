"""One call of a VAE or an upscale model on this rank: a part of the rows of every picture, or some tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...engine.ranks.mesh import BatchMesh
from ...engine.ranks.sharding import BatchShares, in_rounds
from ...engine.rows.plan import run_on_rows
from ...errors import PlanError
from ...nested import map_tensors
from ...pool.messages import Call, CallOutcome
from ...vaes import row_plan_for
from ..shared.pictures import CALLED, INPUT, TILES
from .memory import room
from .mirrors import Mirrors
from .objects import read_leaves

RIGHT, WRONG, LACKING = 0.0, 1.0, 2.0
"""How a rank's tiles of a round went: the last of these for memory."""


def call_on_pictures(
    mirrors: Mirrors, request: Call, arguments: dict[str, Any], mesh: BatchMesh, on_step: Callable[[], None]
) -> tuple[Any, CallOutcome]:
    """Decode, encode or upscale on all ranks. Return the result, which only rank 0 is sure to have, and the outcome.

    Args:
        arguments: INPUT, its dimensions in memory order; `order`, the original index of each dimension; `mode`; `dtype` that the
            network computes in, and `out_dtype` of the result; `memory`, bytes that ComfyUI expects one rank to take; CALLED, where
            that is no method of the network. `exact`: `ratio`, see `run_on_rows`. `tiles`: `shapes` of the results, and `remedy`
            for other ones.
        on_step: called at every convolution, or before every tile, equally often on all ranks.
    """
    mirror = mirrors.mirror_of(request.key)
    mirrors.free_buffers(keep=mirror)
    mirrors.to_device(mirror, arguments["memory"] * request.memory_scale, networks=False)
    if CALLED in arguments:
        called = read_leaves(arguments[CALLED], mirrors.device, lambda _: mirror.model)
    else:
        called = getattr(mirror.model, request.method)
    run = partial(_run, called, mirrors.device, arguments["dtype"], arguments["out_dtype"])
    order = arguments["order"]
    given = map_tensors(arguments[INPUT], lambda tensor: tensor.permute([order.index(dim) for dim in range(tensor.ndim)]))
    with torch.inference_mode():
        if arguments["mode"] == TILES:
            out: Any = _tiles(run, given, arguments, mesh, mirrors.device, on_step)
            degrees = {"tiles": mesh.size}
        else:
            groups = math.gcd(given.shape[0], mesh.size)
            shares = BatchShares(groups, given.shape[0], 1, frozenset({INPUT}), mesh.group_shares(groups))
            sequence = mesh.sequence(shares.groups)
            part = shares.take({INPUT: given}, mesh.index(groups))[INPUT]
            out = run_on_rows(
                mirror.model, row_plan_for(mirror.model), run, part, mesh=sequence, ratio=arguments["ratio"],
                first_only=shares.groups == 1, on_convolution=on_step,
            )  # fmt: skip
            out = mesh.gather(shares, out)
            degrees = {"rows": sequence.size, "batch": shares.groups}
    return out, CallOutcome(degrees=degrees, at_work=math.prod(degrees.values()), room=room(mirrors.device))


def _run(called: Callable[[Tensor], Tensor], device: torch.device, dtype: torch.dtype, out_dtype: torch.dtype, x: Tensor) -> Tensor:
    """Run what is called on a copy, as the input may lie in memory that other processes read."""
    return called(x.to(device=device, dtype=dtype, copy=True)).to(device=device, dtype=out_dtype)


def _tiles(
    run: Callable[[Tensor], Tensor],
    tiles: list[Tensor],
    arguments: dict[str, Any],
    mesh: BatchMesh,
    device: torch.device,
    on_step: Callable[[], None],
) -> list[Tensor] | None:
    """Run the tiles in rounds and send results to rank 0, so that no rank accumulates them or runs ahead of a Cancel. None, and no
    result, where another rank raises OutOfMemoryError."""
    results: dict[int, Tensor] = {}
    group, shapes = mesh.whole, arguments["shapes"]
    sizes = [math.prod(shape) for shape in shapes]
    for now in in_rounds([tile.numel() for tile in tiles], mesh.size, mesh.shares):
        own, made = now[group.rank], [torch.empty(0, dtype=arguments["out_dtype"], device=device)]
        state, failed = RIGHT, None
        try:
            for step in range(max(map(len, now))):
                on_step()
                if step < len(own):
                    out = run(tiles[own[step]])
                    state = state if list(out.shape) == shapes[own[step]] else WRONG
                    made.append(out.reshape(-1))
        except torch.OutOfMemoryError as error:
            state, failed = LACKING, error
        # All ranks must know: otherwise they would wait for data that never arrives.
        worst = group.largest(torch.tensor([state], device=device)).item()
        if failed is not None:
            raise failed
        if worst == LACKING:
            return None
        if worst == WRONG:
            first = next(index for each in now for index in each)
            raise PlanError(
                f"tiles of {tuple(tiles[first].shape)} do not become what the model says of itself, {tuple(shapes[first])}. "
                f"{arguments['remedy']}"
            )
        counts = [sum(sizes[index] for index in each) for each in now]
        for indices, part in zip(now, group.to_first(torch.cat(made), counts, "tiles"), strict=False):
            for index, piece in zip(indices, part.to("cpu").split([sizes[index] for index in indices]), strict=True):
                results[index] = piece.view(shapes[index])
    return [results[index] for index in range(len(tiles))] if group.rank == 0 else None
