"""The state of a running call on one rank: streams, their lengths, and cached results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..compat import versions
from ..errors import PlanError, UnknownStreamError
from ..nested import tensors
from ..recent import Recent
from .ranks.sharding import CONTIGUOUS, JointLayout, Shares, Split, joint_layout

REMEMBERED = 64  # results cached per call; an entry keeps its source alive, so a model may make a mask in every block

# Streams of the queries and of the keys of one attention, each in joint order.
AttentionStreams = tuple[tuple[str, ...], tuple[str, ...]]


class Copied(NamedTuple):
    """A whole tensor, this rank's tokens of it, how often these had changed in place, and where its tokens are."""

    whole: Tensor
    local: Tensor
    version: int
    streams: tuple[str, ...]
    dim: int


class CallState:
    """The state of a running call on one rank: the length of every stream seen so far.

    Args:
        rank: this rank's index on the sequence axes.
        world_size: ranks on the sequence axes.
        gather: (this rank's tokens, stream, dimension of tokens) -> the tokens of all ranks.
        kept: values that transforms keep for later calls of the same model, by transform.
        shares: share of each rank; empty = equal shares.

    Attributes:
        arguments: named arguments of the model's forward, as far as the caller passes them on.
        lengths: tokens of every stream seen so far.
        grids: frames, rows and columns of streams that were grids.
        masked: id of a mask -> the mask, and the streams of its queries and keys, if a transform knows them.
        padding: streams of keys -> additive mask over all of them, in joint order, that hides the padding of shorter batch items.
            It replaces the mask that a module makes for the padding on this rank.
        whole_masks: streams of queries and keys -> mask over all of them, in joint order, that takes the place of another one.
        in_turn: streams of the attentions that follow each other, over and over, if a transform knows them.
        whole: streams gathered on every rank.
        on_all: modules get all tokens at this point of the forward, on every rank.
        copies: where somebody needs them, the inputs of modules that are split.
        gathers: whether neighbouring tokens are gathered.
        noted: for the caller, what patches of node packs have noted.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        gather: Callable[[Tensor, str, int], Tensor] | None = None,
        kept: dict[object, Any] | None = None,
        shares: Shares = (),
    ) -> None:
        self.rank, self.world_size, self.shares = rank, world_size, shares
        self.gathers = world_size > 1
        self.kept = {} if kept is None else kept
        self._gather = gather
        self.arguments: Mapping[str, Any] = {}
        self.lengths: dict[str, int] = {}
        self.grids: dict[str, tuple[int, ...]] = {}
        self.masked: dict[int, tuple[Tensor, AttentionStreams]] = {}  # with the mask, so that no other gets its id
        self.padding: dict[tuple[str, ...], Tensor] = {}
        self.whole_masks: dict[AttentionStreams, Tensor] = {}
        self.in_turn: list[AttentionStreams] = []
        self.whole: set[str] = set()
        self.on_all = False
        self.copies: list[Copied] | None = None
        self.noted: Any = None
        self._splits: dict[str, Split] = {}
        self._layouts: dict[tuple[str, ...], JointLayout] = {}
        self._outer: list[tuple[Any, ...]] = []
        self._finished_tokens: dict[str, tuple[int, int]] = {}  # tokens in modules with separate streams, as in `tokens`
        # Side inputs are the same tensor for every block. Keeping the source prevents its id from being reused.
        self._memo: Recent[tuple[object, ...], tuple[Any, Any]] = Recent(REMEMBERED)

    def layout(self, streams: tuple[str, ...]) -> JointLayout:
        """Return the layout of `streams` in joint order. Raises PlanError if the length of one is unknown."""
        if streams not in self._layouts:
            missing = [name for name in streams if name not in self.lengths]
            if missing:
                raise UnknownStreamError(
                    f"stream {missing[0]!r} is used before any planned argument defined its length. Name one that an argument is "
                    "split as, and put what defines it before what uses it."
                )
            lengths = tuple(self.lengths[name] for name in streams)
            splits = tuple(self._splits.get(name, CONTIGUOUS) for name in streams)
            self._layouts[streams] = joint_layout(lengths, self.world_size, splits, self.shares)
        return self._layouts[streams]

    @property
    def replicates(self) -> bool:
        return any(split.replicated for split in self._splits.values())

    def knows(self, streams: tuple[str, ...]) -> bool:
        return streams in self._layouts or all(name in self.lengths for name in streams)

    def define(self, stream: str, length: int, split: Split = CONTIGUOUS) -> None:
        """Define a stream's length and split. The first definition counts."""
        if stream not in self.lengths:
            self.lengths[stream], self._splits[stream] = length, split

    def gather(self, value: Tensor, stream: str, dim: int) -> Tensor:
        """All-gather a stream's tokens, in order. Every rank must call it."""
        if self._gather is None:
            raise PlanError("no ranks to gather from")
        return self._gather(value, stream, dim)

    def begin(self) -> None:
        """Enter a module with separate streams."""
        self._outer.append((self.lengths, self.grids, self._splits, self._layouts))
        self.lengths, self.grids, self._splits, self._layouts = {}, {}, {}, {}

    def end(self) -> None:
        """Leave such a module."""
        self._finished_tokens = self.tokens()
        self.lengths, self.grids, self._splits, self._layouts = self._outer.pop()

    def restart(self) -> None:
        """Forget all streams: the model starts over, with other tokens under the same names."""
        self._finished_tokens = self.tokens()
        self.lengths, self.grids, self._splits, self._layouts = {}, {}, {}, {}

    def tokens(self) -> dict[str, tuple[int, int]]:
        """Return each stream's token count on all ranks and on this one. Every run of a module with separate streams adds to it,
        and every restart."""
        found = dict(self._finished_tokens)
        for name, length in self.lengths.items():
            total, held = found.get(name, (0, 0))
            found[name] = total + length, held + self.layout((name,)).local_lengths[self.rank]
        return found

    def once(self, key: object, source: Any, make: Any) -> Any:
        """Return `make()`, computed once per call for the object `source`.

        A tensor modified in place counts as a new one. torch does not track that for tensors made in inference mode: their results
        are computed every time. Ranks compute under `torch.no_grad`.
        """
        counts = versions(tensors(source))
        if counts is None:
            return make()
        slot = (key, id(source), counts)
        if slot not in self._memo:
            self._memo[slot] = (source, make())
        return self._memo[slot][1]

    def close(self) -> None:
        """End the call: release its tensors and its reference to the call. Lengths and layouts stay, for reports."""
        self.arguments = {}
        self.masked.clear()
        self.padding.clear()
        self.whole_masks.clear()
        self._memo.clear()
        self._outer.clear()
        self._gather = None
