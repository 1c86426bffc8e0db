"""Transforms of a module's arguments and outputs: the vocabulary of plans.

`ContextParallelInput` and `ContextParallelOutput` keep the names and meanings of diffusers. Added are a tensor's token *streams*
(diffusers knows one anonymous sequence), and arguments that describe tokens without holding them (absolute indices, token ranges).

A transform takes the state of the running call and the full value, and returns this rank's value. It is idempotent: a local value
passes unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..errors import PlanError, bad_value
from ..nested import rebuild
from .ranks.sharding import Split, clip_range, joint_layout
from .state import CallState, Copied


class Transform(Protocol):
    """Turns the full value of an argument into this rank's value."""

    def __call__(self, state: CallState, value: Any, where: str) -> Any: ...


def check_names(owner: Any, *fields: str) -> None:
    """Make tuples of the lists of names in these fields. Raise ConfigError for other values than names and None."""
    for each in fields:
        names = getattr(owner, each)
        if names is not None and not (isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names)):
            raise bad_value(
                f"{type(owner).__name__}({each})",
                names,
                "a tuple of names, or None",
                'Give names as text: ("encoder_hidden_states", "hidden_states").',
            )
        if isinstance(names, list):
            object.__setattr__(owner, each, tuple(names))


def _made(transform: Any, state: CallState, value: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Apply a transform's `make` to a tensor: once per call if every module gets the same tensor."""
    made: Tensor = state.once(transform, value, make) if transform.side else make()
    return made


@dataclass(frozen=True)
class ContextParallelInput:
    """Split a tensor along `split_dim`.

    Args:
        split_dim: dimension that counts tokens. A tensor without that dimension describes no tokens and passes.
        expected_dims: number of dimensions the tensor must have; another number is an error (not a warning).
        split_output: split an output of the module instead of an argument.
        streams: token streams along `split_dim`, in joint order. Unless `side` is set, the first tensor seen defines the length of
            the first of them; the lengths of the others must be known. None = anonymous tokens, always split.
        side: the same tensor comes with every module (positions, masks): it is split once per call and cached.
        frames: for the argument that defines a stream: number of frames, given the state; the stream is split inside each.
        replicated: for the argument that defines a stream: every rank keeps all of it (see `sharding`).
    """

    split_dim: int
    expected_dims: int | None = None
    split_output: bool = False
    streams: tuple[str, ...] | None = field(default=None, kw_only=True)
    side: bool = field(default=False, kw_only=True)
    frames: Callable[[CallState], int] | None = field(default=None, kw_only=True)
    replicated: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_names(self, "streams")

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if isinstance(value, (tuple, list)):
            return rebuild(value, [self(state, item, where) for item in value])
        if isinstance(value, dict):
            return {key: self(state, item, where) for key, item in value.items()}
        if not isinstance(value, Tensor) or value.ndim <= self.split_dim:
            return value
        if self.expected_dims is not None and value.ndim != self.expected_dims:
            raise PlanError(
                f"{where}: expected {self.expected_dims} dimensions, got {value.ndim} {tuple(value.shape)}. Pass "
                f"{self.expected_dims}, or set expected_dims of the plan to what the module is called with."
            )
        dim = self.split_dim if self.split_dim >= 0 else self.split_dim + value.ndim
        if dim < 0:
            raise PlanError(f"{where}: dimension {self.split_dim} of {tuple(value.shape)}, which has none there. Correct the plan.")
        length = value.shape[dim]
        if self.streams is None:
            return joint_layout((length,), state.world_size, (), state.shares).take_local(value, state.rank, dim)
        if not self.side and self.streams[0] not in state.lengths:
            frames = self.frames(state) if self.frames else 1
            known = sum(state.layout((name,)).total for name in self.streams[1:])
            state.define(self.streams[0], length - known, Split(frames, self.replicated))
        layout = state.layout(self.streams)
        if length == layout.local_lengths[state.rank]:  # already local, or held in full
            return value
        if length == layout.total:
            local = _made(self, state, value, lambda: layout.take_local(value, state.rank, dim))
            if state.copies is not None and not self.side:
                state.copies.append(Copied(value, local, local._version, self.streams, dim))
            return local
        if length == 1:  # applies to all tokens
            return value
        raise PlanError(
            f"{where}: dimension {dim} of {tuple(value.shape)} is {length}; expected {layout.total} tokens "
            f"({' + '.join(f'{name} {state.lengths[name]}' for name in self.streams)}) or this rank's "
            f"{layout.local_lengths[state.rank]}. Other tokens under the same name need a stream of their own: "
            'ContextParallelInput(..., streams=("another name",)).'
        )


@dataclass(frozen=True)
class ContextParallelOutput:
    """Gather an output along `gather_dim`: every rank returns the tokens of the whole stream.

    Args:
        gather_dim: dimension that counts tokens; for a stream that came as a grid, its first dimension, frames.
        expected_dims: number of dimensions the output must have.
        stream: stream of the tokens; several streams in joint order where the module returns them joint.
        within: streams of the output in joint order, where only the tokens of `stream` are gathered and the others stay local.
        when: whether the running call gathers it; None = always.
    """

    gather_dim: int
    expected_dims: int | None = None
    stream: str | tuple[str, ...] | None = field(default=None, kw_only=True)
    within: tuple[str, ...] = field(default=(), kw_only=True)
    when: Callable[[CallState], bool] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_names(self, "within", *(() if isinstance(self.stream, str) else ("stream",)))


@dataclass(frozen=True, kw_only=True)
class GridInput:
    """Split a tensor whose tokens form a grid of frames, rows and columns, inside each frame.

    The result has the same number of dimensions: frames, this rank's tokens of a frame, 1. Only for modules that treat rows and
    columns alike. A tensor of size 1 in all three describes no tokens and passes.

    Args:
        stream: stream of the tokens; the first tensor seen defines it.
        dim: the first of the three dimensions.
        side: every module gets the same tensor: it is split once per call.
    """

    stream: str
    dim: int = 1
    side: bool = False

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        grid = tuple(value.shape[self.dim : self.dim + 3])
        if len(grid) != 3:
            raise PlanError(f"{where}: expected frames, rows and columns from dimension {self.dim}, got {tuple(value.shape)}")
        if not self.side:
            state.define(self.stream, math.prod(grid), Split(frames=grid[0]))
            state.grids.setdefault(self.stream, grid)
        layout = state.layout((self.stream,))
        if math.prod(grid) == layout.local_lengths[state.rank] or math.prod(grid) == 1:
            return value
        if grid != state.grids[self.stream]:
            raise PlanError(f"{where}: expected a grid of {state.grids[self.stream]} tokens, got {grid}")
        tokens = value.flatten(self.dim, self.dim + 2)
        return _made(
            self, state, value, lambda: layout.take_local(tokens, state.rank, self.dim).unflatten(self.dim, (grid[0], -1, 1))
        )


@dataclass(frozen=True, kw_only=True)
class WithNeighbours:
    """Extend this rank's tokens by their neighbours, for operations other than attention: convolutions, windows, sums.

    Splitting the output by `WithoutNeighbours` (or by `ContextParallelInput` if it has all tokens) removes them again.

    Args:
        stream: stream of the tokens, already defined, local or whole.
        reach: number of tokens on either side; None = all.
        dim: dimension that counts tokens.
        side: every module gets the same tensor: it is gathered once per call.
    """

    stream: str
    reach: int | None = None
    dim: int = 1
    side: bool = False

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if isinstance(value, (tuple, list)):
            return rebuild(value, [self(state, item, where) for item in value])
        if not isinstance(value, Tensor) or not state.gathers:
            return value
        return _made(self, state, value, lambda: self._extended(state, value))

    def _extended(self, state: CallState, value: Tensor) -> Tensor:
        layout = state.layout((self.stream,))
        whole = value if value.shape[self.dim] != layout.local_lengths[state.rank] else state.gather(value, self.stream, self.dim)
        if self.reach is None:
            return whole
        start, stop = layout.window(state.rank)
        return whole[(slice(None),) * self.dim + (slice(max(start - self.reach, 0), stop + self.reach),)]


@dataclass(frozen=True, kw_only=True)
class WithoutNeighbours:
    """Remove the neighbours added by `WithNeighbours` with the same stream and reach."""

    stream: str
    reach: int
    dim: int = 1

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if not isinstance(value, Tensor) or state.world_size == 1:
            return value
        start, stop = state.layout((self.stream,)).window(state.rank)
        return value.narrow(self.dim, min(start, self.reach), stop - start)


@dataclass(frozen=True, kw_only=True)
class TokenRanges:
    """Clip (start, stop or None for the end, ...) over streams in joint order to this rank's tokens, dropping empty ones.

    Takes a list of ranges, a single one, which must lie within one stream, or an index that divides a stream in two. Tensors behind
    start and stop have a value per token of the range.

    Args:
        streams: the streams that the ranges refer to.
        after: a stream in front of them in the same tensor, by its *local* length: the caller has shifted every range by it,
            except a start of 0, which also covers that stream.
    """

    streams: tuple[str, ...]
    after: str | None = None

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if value is None:
            return None
        layout = state.layout(self.streams)
        if not isinstance(value, (tuple, list)):
            return clip_range(0, int(value), layout.window(state.rank))[1]
        if isinstance(value, tuple):
            (local,) = self(state, [value], where)
            return local
        shift = at = state.layout((self.after,)).local_lengths[state.rank] if self.after else 0
        found = []
        for begin, end in (segment for segments in layout.held[state.rank] for segment in segments):
            for start, stop, *rest in value:
                start = max(start - shift, 0)
                low, high = clip_range(start, layout.total if stop is None else stop - shift, (begin, end))
                part = slice(begin + low - start, begin + high - start)
                low, high = (0 if start == low == 0 and self.after else at + low), at + high
                if high > low:
                    found.append((low, high, *(v[part] if isinstance(v, Tensor) else v for v in rest)))
            at += end - begin
        return found
