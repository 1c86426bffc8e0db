"""Sharding plans: data that says which arguments of which modules are split, and which output is gathered.

`ContextParallelInput` and `ContextParallelOutput` keep the names and meanings of diffusers. What is added: the token
*streams* a tensor belongs to (diffusers knows one anonymous sequence), and arguments that are not tensors of tokens but
speak about tokens (absolute indices, token ranges, per-frame values).

A transform is called with the state of the running call and the full value, and returns what this rank's shard of the
module must see. It is idempotent: a value that is local already passes unchanged.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .compat import version
from .errors import PlanError
from .sharding import WHOLE, JointLayout, Split, clip_range, normalize_dim

REMEMBERED = 64  # results of one call that are kept for the blocks to come


class CallState:
    """What one rank knows about the call that is running: the length of every stream seen so far.

    Args:
        rank: this rank's index on the sequence axes.
        world_size: ranks on the sequence axes.
        gather: (this rank's tokens, stream, dimension of tokens) -> the tokens of all ranks.

    Attributes:
        arguments: of the model's forward, by name, as far as the caller tells.
        lengths: tokens of every stream seen so far.
        grids: frames, rows and columns of streams that were grids.
        masked: id of a mask -> the mask, streams of the queries and keys it comes with, where a transform made them known.
        gathered: streams that every rank has all tokens of again.
    """

    def __init__(self, rank: int, world_size: int, gather: Callable[[Tensor, str, int], Tensor] | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self._gather = gather
        self.arguments: Mapping[str, Any] = {}
        self.lengths: dict[str, int] = {}
        self.grids: dict[str, tuple[int, ...]] = {}
        self.masked: dict[int, tuple[Tensor, AttentionStreams]] = {}
        self.gathered: set[str] = set()
        self._splits: dict[str, Split] = {}
        self._layouts: dict[tuple[str, ...], JointLayout] = {}
        self._around: list[tuple[Any, ...]] = []
        # Side inputs are the same tensor for every block. The source is kept, so that its id cannot be reused. A tensor that is
        # changed in place counts as another one, except under inference_mode, where torch does not say that it was.
        self._memo: dict[tuple[object, ...], tuple[Any, Any]] = {}

    def layout(self, streams: tuple[str, ...]) -> JointLayout:
        """Layout of `streams` in joint order. Raises PlanError when one of them has not been seen yet."""
        layout = self._layouts.get(streams)
        if layout is None:
            missing = [name for name in streams if name not in self.lengths]
            if missing:
                raise PlanError(f"stream {missing[0]!r} is used before any planned argument defined its length")
            splits = tuple(self._splits.get(name, WHOLE) for name in streams)
            layout = JointLayout(
                tuple(self.lengths[name] for name in streams),
                self.world_size,
                () if set(splits) == {WHOLE} else splits,
            )
            self._layouts[streams] = layout
        return layout

    def define(self, stream: str, length: int, split: Split = WHOLE) -> None:
        """Say how long a stream is and how it is split. The first to say so is right."""
        if stream not in self.lengths:
            self.lengths[stream], self._splits[stream] = length, split

    def gather(self, value: Tensor, stream: str, dim: int) -> Tensor:
        """The tokens of all ranks, in order. Every rank must call it."""
        if self._gather is None:
            raise PlanError("no ranks to gather from")
        return self._gather(value, stream, dim)

    def begin(self) -> None:
        """Enter a module whose streams have lengths of their own."""
        self._around.append((self.lengths, self.grids, self._splits, self._layouts))
        self.lengths, self.grids, self._splits, self._layouts = {}, {}, {}, {}

    def end(self) -> None:
        """Leave it."""
        self.lengths, self.grids, self._splits, self._layouts = self._around.pop()

    def once(self, key: object, source: Any, make: Any) -> Any:
        """Return `make()`, computed once per call for the object `source`."""
        slot = (key, id(source), version(source))
        if slot not in self._memo:
            self._memo[slot] = (source, make())
            if len(self._memo) > REMEMBERED:
                del self._memo[next(iter(self._memo))]
        return self._memo[slot][1]


class Transform(Protocol):
    """Turns the full value of an argument into this rank's value."""

    def __call__(self, state: CallState, value: Any, where: str) -> Any: ...


@dataclass(frozen=True)
class ContextParallelInput:
    """Split a tensor along `split_dim`.

    Args:
        split_dim: dimension that counts tokens. A tensor without that dimension says nothing about tokens and passes.
        expected_dims: number of dimensions the tensor must have; another number is an error (not a warning).
        split_output: split an output of the module instead of an argument.
        streams: token streams along `split_dim`, in joint order. Unless `side` is set, the first tensor seen defines the length
            of the first of them; those behind it must be known. None = tokens of their own, of which nothing else is known:
            always split.
        side: the same tensor comes with every module (positions, masks): it is split once per call and kept.
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

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if isinstance(value, (tuple, list)):
            return rebuild(value, [self(state, item, where) for item in value])
        if not isinstance(value, Tensor) or value.ndim <= self.split_dim:
            return value
        if self.expected_dims is not None and value.ndim != self.expected_dims:
            raise PlanError(
                f"{where}: expected {self.expected_dims} dimensions, got {value.ndim} {tuple(value.shape)}. Correct the plan: "
                "expected_dims must be what the module is called with."
            )
        dim = normalize_dim(self.split_dim, value.ndim)
        length = value.shape[dim]
        if self.streams is None:
            return JointLayout((length,), state.world_size).take_local(value, state.rank, dim)
        if not self.side:
            frames = self.frames(state) if self.frames else 1
            known = sum(state.layout((name,)).total for name in self.streams[1:])
            state.define(self.streams[0], length - known, Split(frames, self.replicated))
        layout = state.layout(self.streams)
        if length == layout.total == layout.local_lengths[state.rank]:  # one rank, or replicated
            return value
        if length == layout.total:
            if not self.side:
                return layout.take_local(value, state.rank, dim)
            return state.once(self, value, lambda: layout.take_local(value, state.rank, dim))
        if length in (1, layout.local_lengths[state.rank]):  # broadcast over tokens, or local already
            return value
        raise PlanError(
            f"{where}: dimension {dim} of {tuple(value.shape)} is {length}; expected {layout.total} tokens "
            f"({' + '.join(f'{name} {state.lengths[name]}' for name in self.streams)}) or this rank's "
            f"{layout.local_lengths[state.rank]}"
        )


@dataclass(frozen=True)
class ContextParallelOutput:
    """Gather an output along `gather_dim`: every rank returns the tokens of the whole stream.

    Args:
        gather_dim: dimension that counts tokens; for a stream that came as a grid, its first dimension, frames.
        expected_dims: number of dimensions the output must have.
        stream: whose tokens they are; several streams in joint order where the module returns them joint.
        within: streams of the output in joint order, where only the tokens of `stream` are gathered and the others stay local.
        when: whether it is gathered in the running call; None = always.
    """

    gather_dim: int
    expected_dims: int | None = None
    stream: str | tuple[str, ...] | None = field(default=None, kw_only=True)
    within: tuple[str, ...] = field(default=(), kw_only=True)
    when: Callable[[CallState], bool] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class GridInput:
    """Split a tensor whose tokens lie in three dimensions, frames, rows and columns, inside each frame.

    What a rank gets has the same number of dimensions: frames, its tokens of a frame, 1. Works for modules that treat rows and
    columns alike. A size of 1 in all three says nothing about tokens and passes.

    Args:
        stream: the tokens; the first tensor seen defines them.
        dim: the first of the three dimensions.
        side: the same tensor comes with every module.
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
        if not self.side:
            return self._local(state, value)
        local: Tensor = state.once(self, value, lambda: self._local(state, value))
        return local

    def _local(self, state: CallState, value: Tensor) -> Tensor:
        frames = value.shape[self.dim]
        tokens = value.flatten(self.dim, self.dim + 2)
        local = state.layout((self.stream,)).take_local(tokens, state.rank, self.dim)
        shaped: Tensor = local.unflatten(self.dim, (frames, -1, 1))
        return shaped


@dataclass(frozen=True, kw_only=True)
class WithNeighbours:
    """This rank's tokens and those next to them, for what is no attention over all tokens: convolutions, windows, sums.

    Splitting the output by `WithoutNeighbours` (or `ContextParallelInput`, where these are all tokens) leaves this rank's own.

    Args:
        stream: whose tokens, already defined, local or whole.
        reach: tokens on either side; None = all.
        dim: dimension that counts tokens.
        side: the same tensor comes with every module: it is gathered once per call.
    """

    stream: str
    reach: int | None = None
    dim: int = 1
    side: bool = False

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if isinstance(value, (tuple, list)):
            return rebuild(value, [self(state, item, where) for item in value])
        if not isinstance(value, Tensor) or state.world_size == 1:
            return value
        return state.once(self, value, lambda: self._extended(state, value)) if self.side else self._extended(state, value)

    def _extended(self, state: CallState, value: Tensor) -> Tensor:
        layout = state.layout((self.stream,))
        whole = value if value.shape[self.dim] == layout.total else state.gather(value, self.stream, self.dim)
        if self.reach is None:
            return whole
        start, stop = layout.window(state.rank)
        return whole[(slice(None),) * self.dim + (slice(max(start - self.reach, 0), stop + self.reach),)]


@dataclass(frozen=True, kw_only=True)
class WithoutNeighbours:
    """What `WithNeighbours` of the same stream and reach added is taken away."""

    stream: str
    reach: int
    dim: int = 1

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if not isinstance(value, Tensor) or state.world_size == 1:
            return value
        start, stop = state.layout((self.stream,)).window(state.rank)
        return value.narrow(self.dim, min(start, self.reach), stop - start)


@dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """An absolute token index that separates a stream in two: becomes the boundary inside the local range."""

    stream: str

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if value is None:
            return None
        window = state.layout((self.stream,)).window(state.rank)
        return clip_range(0, int(value), window)[1]


@dataclass(frozen=True, kw_only=True)
class TokenRanges:
    """A list of (start, stop, ...) over a stream: each becomes its part inside the local range, empty ones vanish.

    Args:
        stream: the stream the ranges speak about.
        after: a stream that stands before it in the same tensor, by its *local* length: the caller has shifted every range
            by it, except a start of 0, which also covers that stream.
    """

    stream: str
    after: str | None = None

    def __call__(self, state: CallState, value: Any, where: str) -> Any:
        if value is None:
            return None
        window = state.layout((self.stream,)).window(state.rank)
        shift = state.layout((self.after,)).local_lengths[state.rank] if self.after else 0
        local = []
        for start, stop, *rest in value:
            low, high = clip_range(max(start - shift, 0), stop - shift, window)
            low, high = (0 if start == 0 else low + shift), high + shift
            if high > low:
                local.append((low, high, *rest))
        return local


# Streams of the queries and of the keys of one attention, each in joint order.
AttentionStreams = tuple[tuple[str, ...], tuple[str, ...]]
# What the attention inside a module may be over, given the arguments of its forward. Empty = no communication.
AttentionRule = Callable[[Mapping[str, Any]], Sequence[AttentionStreams]]


@dataclass(frozen=True, kw_only=True)
class ModulePlan:
    """What happens to one module, or to every module that a pattern with one `*` names.

    Args:
        inputs: argument name -> transform. Arguments that define a stream stand before those that use it. What a module takes by
            `**name` is written "name.argument".
        outputs: index of an output -> how it is split.
        attention: streams of the self-attention inside the module, in joint order; empty = no communication inside; None =
            as around the module, and around all of them there is none unless the plan says so.
        keys: streams of the keys and values, where they are not those of the queries.
        local: submodules, relative to the module, whose attention needs no communication (replicated keys and values).
        separate: the module splits its inputs and gathers its output itself: its streams have lengths of their own.
        when: given the model and the path of a module that the pattern names, whether the plan is for it; None = always.
    """

    inputs: Mapping[str, Transform] = field(default_factory=dict)
    outputs: Mapping[int, Transform] = field(default_factory=dict)
    attention: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    local: tuple[str, ...] = ()
    separate: bool = False
    when: Callable[[nn.Module, str], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """How a module is sharded, with its own forward.

    Args:
        modules: pattern -> what happens to those modules; "" is the module itself.
        outputs: module path -> which stream is gathered from its output, or from each of its outputs (None = left alone).
        attention: what attention outside of all planned modules may be over, once one of the streams is known.
        attention_rule: for modules that decide by their arguments what they attend to: module -> rule, or None.
    """

    modules: Mapping[str, ModulePlan]
    outputs: Mapping[str, ContextParallelOutput | Sequence[ContextParallelOutput | None]]
    attention: Sequence[AttentionStreams] = ()
    attention_rule: Callable[[nn.Module], AttentionRule | None] | None = None

    @property
    def origin(self) -> str:
        """Whose plan this is, for messages."""
        return "the plan"

    @property
    def remedy(self) -> str:
        """What to do when it does not fit."""
        return "Correct the plan."

    def check(self, model: nn.Module) -> None:
        """Raise PlanError unless every module and argument that the plan relies on exists in `model`."""
        for pattern, plan in self.modules.items():
            for name, module in find_modules(model, pattern, f"{self.origin}: ", self.remedy):
                parameters = argument_names(module)
                for argument in plan.inputs:
                    if argument.partition(".")[0] not in parameters:
                        raise PlanError(
                            f"{self.origin}: {name} ({type(module).__name__}) has no argument {argument!r}; "
                            f"it has {', '.join(parameters)}. {self.remedy}"
                        )
                for local in plan.local:
                    find_modules(module, local, f"{self.origin}: {name}.", self.remedy)
        for path in self.outputs:
            find_modules(model, path, f"{self.origin}: ", self.remedy)


@dataclass(frozen=True, kw_only=True)
class FamilyPlan(ShardingPlan):
    """How one class of ComfyUI's models is sharded.

    Args:
        family: name shown to users.
        model_class: full name of the module class that the plan was written for.
        comfyui: version of ComfyUI the argument names were checked against.
        control: kind of ControlNet residuals ("input", "middle", "output") -> the stream, or streams in joint order, that they
            are added to, or None where they are no tokens. Empty = the model takes none.
        attention_names: full names of functions that ComfyUI's attention is called by where no transformer_options reach it.
        shares_batch: whether what the model computes of one item of a batch is the same without the others.
        rebuilt: "argument.key" of objects in dicts that the forward makes again where they are missing: not sent to the workers.
    """

    family: str
    model_class: str
    comfyui: str = "0.30.0"
    control: Mapping[str, str | tuple[str, ...] | None] = field(default_factory=dict)
    attention_names: tuple[str, ...] = ()
    shares_batch: bool = True
    rebuilt: tuple[str, ...] = ()

    @property
    def shares_sequence(self) -> bool:
        """Whether ranks can share a sequence. If not, they share a batch only."""
        return bool(self.outputs)

    @property
    def origin(self) -> str:
        return f"{self.family} plan (checked against ComfyUI {self.comfyui})"

    @property
    def remedy(self) -> str:
        return "Update this extension, or use the ComfyUI version it was checked against."


def rebuild(value: Any, items: list[Any]) -> Any:
    """A tuple, named tuple or list of the same type with other items."""
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def find_modules(root: nn.Module, pattern: str, prefix: str = "", remedy: str = "") -> Sequence[tuple[str, nn.Module]]:
    """Return (path, module) of every module that `pattern` names; `*` stands for one path component, `-1` for the last of a list.

    Raises:
        PlanError: if there is none.
    """
    parts = pattern.split(".")
    found = [
        (name, module)
        for name, module in root.named_modules()
        if len(split := name.split(".")) == len(parts)
        and all(p == s or (p == "*" and s) or (p == "-1" and s.isdigit()) for p, s in zip(parts, split, strict=True))
    ]
    for i in (i for i, part in enumerate(parts) if part == "-1"):
        ends = max((int(name.split(".")[i]) for name, _ in found), default=0)
        found = [(name, module) for name, module in found if int(name.split(".")[i]) == ends]
    there = dict(root.named_modules()).get(pattern.removesuffix(".*"))
    if not found and not (isinstance(there, nn.ModuleList) and len(there) == 0):  # some models have no blocks of one kind
        raise PlanError(f"{prefix}no module {pattern!r} in {type(root).__name__}. {remedy}".rstrip())
    return found


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a module's forward, in order, without `self`; of `*args`, `args[0]` and so on."""
    names: list[str] = []
    for name, parameter in list(inspect.signature(type(module).forward).parameters.items())[1:]:
        names += [f"{name}[{i}]" for i in range(8)] if parameter.kind is parameter.VAR_POSITIONAL else [name]
    return tuple(names)
