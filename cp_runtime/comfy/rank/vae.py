"""One call of a VAE on this rank: a part of the rows of every picture, or some tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...engine.ranks.collectives import RankGroup
from ...engine.ranks.mesh import BatchMesh
from ...engine.ranks.sharding import BatchShares, in_rounds
from ...engine.rows.plan import run_on_rows
from ...errors import PlanError
from ...nested import map_tensors
from ...pool.messages import Call, CallOutcome
from ...vaes import row_plan_for
from ..shared.vae import INPUT, TILES
from .memory import room
from .mirrors import Mirrors
from .model import Mirror


def call_vae(
    mirrors: Mirrors, request: Call, arguments: dict[str, Any], mesh: BatchMesh, on_step: Callable[[], None]
) -> tuple[Any, CallOutcome]:
    """Decode or encode on all ranks. Return the result, which only rank 0 is sure to have, and the outcome.

    Args:
        arguments: INPUT, its dimensions in memory order; `order`, the original index of each dimension; `mode`; `dtype` that the
            VAE computes in, and `out_dtype` of the result; `memory`, bytes that ComfyUI expects one rank to take. `exact`: `ratio`,
            see `run_on_rows`. `tiles`: `shapes` of the results.
        on_step: called at every convolution, or before every tile, equally often on all ranks.
    """
    mirror = mirrors.mirror_of(request.key)
    mirrors.free_buffers(keep=mirror)
    mirrors.to_device(mirror, arguments["memory"] * request.memory_scale, networks=False)
    run = partial(_run, mirror, request.method, mirrors.device, arguments["dtype"], arguments["out_dtype"])
    order = arguments["order"]
    given = map_tensors(arguments[INPUT], lambda tensor: tensor.permute([order.index(dim) for dim in range(tensor.ndim)]))
    with torch.inference_mode():
        if arguments["mode"] == TILES:
            out: Any = _tiles(run, given, arguments["shapes"], arguments["out_dtype"], mesh.whole, mirrors.device, on_step)
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


def _run(mirror: Mirror, method: str, device: torch.device, dtype: torch.dtype, out_dtype: torch.dtype, x: Tensor) -> Tensor:
    """Run the VAE's method on a copy, as the input may lie in memory that other processes read."""
    out: Tensor = getattr(mirror.model, method)(x.to(device=device, dtype=dtype, copy=True))
    return out.to(device=device, dtype=out_dtype)


def _tiles(
    run: Callable[[Tensor], Tensor],
    tiles: list[Tensor],
    shapes: list[list[int]],
    dtype: torch.dtype,
    group: RankGroup,
    device: torch.device,
    on_step: Callable[[], None],
) -> list[Tensor] | None:
    """Run one tile per rank at a time and send results to rank 0, so that no rank accumulates them or runs ahead of a Cancel."""
    results: dict[int, Tensor] = {}
    for now in in_rounds([tile.numel() for tile in tiles], group.size):
        on_step()
        mine = now[group.rank] if group.rank < len(now) else None
        out = torch.empty(0, dtype=dtype, device=device) if mine is None else run(tiles[mine])
        wrong = float(mine is not None and list(out.shape) != shapes[mine])
        # All ranks must know: otherwise they would wait for data that never arrives.
        if group.largest(torch.tensor([wrong], device=device)).item():
            raise PlanError(
                f"tiles of {tuple(tiles[now[0]].shape)} do not become what the VAE says of itself, {tuple(shapes[now[0]])}. Set "
                "tile_size and overlap to multiples of 64, or mode to exact."
            )
        counts = [math.prod(shapes[index]) for index in now] + [0] * (group.size - len(now))
        for index, part in zip(now, group.to_first(out, counts, "tiles"), strict=False):
            results[index] = part.to("cpu").view(shapes[index])
    return [results[index] for index in range(len(tiles))] if group.rank == 0 else None
