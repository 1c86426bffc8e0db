"""Check that arguments are the same on all ranks, and that the output equals that of the module in one process."""

from __future__ import annotations

import dataclasses
import inspect
import json
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..compat import not_compiled, not_compiled_itself
from ..engine.ranks.collectives import RankGroup
from ..errors import ConfigError, PlanError
from ..nested import elements, has_elements, map_tensors, tensors

# Largest difference in float32, root mean square in half precision, in standard deviations of the output. Sharding causes 1e-5 and
# the rounding of the dtype; attention over the wrong tokens is off by 0.1 and more.
TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2
ERROR, MESSAGE = "an error", 512  # characters of an error that are sent to other ranks
Result = TypeVar("Result")


def check_settings(settings: Mapping[str, Any], group: RankGroup) -> None:
    """Raise ConfigError, on all ranks alike, unless all ranks have the same settings. One collective of 4 KB."""
    if wrong := _differing(settings, group):
        raise ConfigError(
            f"{wrong}: not what rank {group.global_rank(0)} has. Call apply_context_parallel with the same arguments on all ranks."
        )


@not_compiled
def check_inputs(
    module: str,
    forward: Callable[..., Any],
    group: RankGroup,
    args: Any,
    kwargs: Mapping[str, Any],
    error: PlanError | None,
    weights: int,
) -> None:
    """Raise PlanError, on all ranks alike, unless all ranks have the same arguments. One collective of some bytes.

    Args:
        module: name for messages.
        forward: the module's own.
        group: ranks that share the sequence.
        error: an error that keeps this rank from the call; all raise it.
        weights: a number for the module's weights.
    """
    signature = inspect.signature(forward)
    names = [*signature.parameters, "arguments"]
    try:
        given: Mapping[str, Any] = signature.bind(*args, **kwargs).arguments
    except TypeError:  # calling forward will raise it
        given = {"arguments": (args, dict(kwargs))}
    if wrong := _differing({name: given.get(name) for name in names} | {"its weights": weights}, group, error):
        raise PlanError(
            f"{module}: {wrong}: not what rank {group.global_rank(0)} was given. The ranks of a sequence compute one call "
            "together: give all of them the same inputs, such as noise from generators of the same seed, or broadcast them, and "
            "the same weights and LoRAs."
        )


def _differing(values: Mapping[str, Any], group: RankGroup, error: PlanError | None = None) -> str:
    """Compare values of the same names on all ranks. Return those that differ, and on which ranks, for messages; empty if none do.

    Raises `error` on all ranks if a rank has one.
    """
    table = agree([digest(value) for value in values.values()] if error is None else error, group)
    ranks = [str(group.global_rank(rank)) for rank, row in enumerate(table) if row != table[0]]
    wrong = [name for name, column in zip(values, zip(*table, strict=True), strict=True) if len(set(column)) > 1]
    return f"{', '.join(wrong)} on rank {', '.join(ranks)}" if wrong else ""


def digest(value: Any) -> int:
    """Hash a value to a number that is the same in every process, and almost certainly differs for another value."""
    if isinstance(value, Tensor):
        return _mixed(str(value.dtype), tuple(value.shape), _sum_of(value))
    if isinstance(value, (list, tuple)):
        return _mixed("sequence", *map(digest, value))
    if isinstance(value, Mapping):
        return _mixed("mapping", *((str(key), digest(item)) for key, item in value.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _mixed(type(value).__qualname__, *(digest(getattr(value, field.name)) for field in dataclasses.fields(value)))
    return _mixed(type(value).__qualname__, value if isinstance(value, (bool, int, float, str)) else None)


def _mixed(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def _sum_of(tensor: Tensor) -> int:
    """Return the sum of the bytes, each weighted by its position."""
    if not has_elements(tensor) or not tensor.numel():
        return 0
    data = elements(tensor)
    # An expanded single number, such as a pipeline's timestep, counts as contiguous, but has stride 0 and cannot be viewed.
    data = data.detach().contiguous().as_strided((data.numel(),), (1,)).view(torch.uint8)
    words = data.view(torch.int32) if data.numel() % 4 == 0 else data
    # Knuth's multiplicative hash of each place, modulo the largest prime below 2^32: a sum alone is the same for swapped numbers.
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return int((words * (places * 2654435761 % 4294967291)).sum())


def agree(value: Any, group: RankGroup) -> list[Any]:
    """All-gather a value as JSON; raise it on all ranks if it is an error. One collective of 4 KB."""
    own = value if isinstance(value, Exception) else None
    if own is not None:
        kind = "" if isinstance(own, PlanError) else f"{type(own).__name__}: "
        where = "" if isinstance(own, ErrorOfRank) else f"rank {group.global_rank(group.rank)}: "
        value = {ERROR: where + f"{kind}{own}"[:MESSAGE]}
    # Of one size, for values and errors: a rank with an error enters the same collective as the others.
    text = json.dumps(value).encode().ljust(8 * MESSAGE)  # at most 6 bytes per character
    padded = torch.tensor(list(text), dtype=torch.uint8, device=group.device)
    (rows,) = group.all_gather([padded[None]], [1] * group.size, 0)
    answers = [json.loads(bytes(row)) for row in rows.tolist()]
    for answer in answers:
        if isinstance(answer, dict) and ERROR in answer:
            raise own or ErrorOfRank(answer[ERROR], group)
    return answers


class ErrorOfRank(PlanError):
    """An error of another rank of a group, raised on all its ranks."""

    def __init__(self, text: str, group: RankGroup) -> None:
        super().__init__(text)
        self.group = group


@not_compiled_itself
def in_step(run: Callable[[Callable[[], None]], Result], group: RankGroup) -> Result:
    """Run a function on all ranks, and raise an error of one rank on all. Ranks with an error raise their own.

    `run` gets a function to call before any exchange between ranks: they ask each other whether all have reached it, so that none
    waits for a failed one. A collective of a number.
    """
    ask = partial(_ask, group)
    try:
        out = run(ask)
        ask()
    except Exception as error:
        if getattr(error, "group", None) is not group:  # else all know
            with suppress(Exception):  # it is raised below; or other ranks are gone
                ask(error)
        raise
    return out


@not_compiled
def _ask(group: RankGroup, error: Exception | None = None) -> None:
    if group.largest(torch.tensor([float(error is not None)], device=group.device)).item():
        agree(error, group)


def device_of(values: Any) -> torch.device:
    return next((tensor.device for tensor in tensors(values)), torch.device("cpu"))


def expected_output(forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Run the module's forward in one process, outside of any sharded call; return its tensors."""
    copies = map_tensors([args, dict(kwargs)], Tensor.clone)  # a model may modify its inputs
    return list(tensors(forward(*copies[0], **copies[1])))


@not_compiled
def check_output(module: str, out: Any, expected: list[Tensor], group: RankGroup) -> None:
    """Raise PlanError, on all ranks alike, if an output differs on any rank."""
    found = list(tensors(out))
    same = [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    worst = max([_error(a, b) for a, b in zip(found, expected, strict=True)], default=0.0) if same else torch.inf
    worst = group.largest(torch.tensor([worst], dtype=torch.float32, device=device_of(found))).item()
    if not same:
        raise PlanError(
            f"{module}: verify found an output of {_shapes(found)}, and in one process of {_shapes(expected)}: tokens were split "
            "and not gathered. Add to the plan the last module that treats each token alone: {its path: "
            "ContextParallelOutput(gather_dim=1)}."
        )
    if worst > 1:
        raise PlanError(
            f"{module}: verify found the output off by {worst:.3g} times what rounding explains, against one process. "
            "Attention outside of scaled_dot_product_attention or over less than the sequence (windows, frames), and sums over "
            "tokens, need a plan of their own: ModulePlan, or split behind them. Random numbers differ between ranks."
        )


def _shapes(values: list[Tensor]) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in values)


def _spread(values: Tensor) -> Tensor:
    return (values.std() if values.numel() > 1 else values.abs().amax()).clamp_min(1e-12)


def _error(out: Tensor, expected: Tensor) -> float:
    """Return the difference, in units of the tolerance."""
    if not expected.is_floating_point() or not expected.numel():
        return 0.0 if torch.equal(out, expected) else torch.inf
    exact = torch.promote_types(expected.dtype, torch.float32) == expected.dtype
    difference, spread = (out - expected).cpu().double(), _spread(expected.cpu().double())  # some GPUs have no float64
    size = difference.abs().max() / TOLERANCE if exact else difference.square().mean().sqrt() / HALF_TOLERANCE
    return float((size / spread).nan_to_num(torch.inf))
