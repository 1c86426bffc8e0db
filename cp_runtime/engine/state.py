"""What a rank knows about the call that is running: streams, their lengths, and what was made of arguments that come again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..compat import versions
from ..errors import PlanError, UnknownStreamError
from ..nested import tensors
from .sharding import CONTIGUOUS, JointLayout, Shares, Split, joint_layout

REMEMBERED = 64  # results of one call that are kept for the blocks to come

# Streams of the queries and of the keys of one attention, each in joint order.
AttentionStreams = tuple[tuple[str, ...], tuple[str, ...]]


class CallState:
    """What one rank knows about the call that is running: the length of every stream seen so far.

    Args:
        rank: this rank's index on the sequence axes.
        world_size: ranks on the sequence axes.
        gather: (this rank's tokens, stream, dimension of tokens) -> the tokens of all ranks.
        kept: what a transform keeps for the next calls of the same model, under the transform itself as key.
        shares: of the ranks.

    Attributes:
        arguments: of the model's forward, by name, as far as the caller tells.
        lengths: tokens of every stream seen so far.
        grids: frames, rows and columns of streams that were grids.
        masked: id of a mask -> the mask, streams of the queries and keys it comes with, where a transform made them known.
        whole: streams that every rank has all tokens of again.
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
        self.kept = {} if kept is None else kept
        self._gather = gather
        self.arguments: Mapping[str, Any] = {}
        self.lengths: dict[str, int] = {}
        self.grids: dict[str, tuple[int, ...]] = {}
        self.masked: dict[int, tuple[Tensor, AttentionStreams]] = {}
        self.whole: set[str] = set()
        self._splits: dict[str, Split] = {}
        self._layouts: dict[tuple[str, ...], JointLayout] = {}
        self._around: list[tuple[Any, ...]] = []
        # Side inputs are the same tensor for every block. The source is kept, so that its id cannot be reused.
        self._memo: dict[tuple[object, ...], tuple[Any, Any]] = {}

    def layout(self, streams: tuple[str, ...]) -> JointLayout:
        """Layout of `streams` in joint order. Raises PlanError when one of them has not been seen yet."""
        layout = self._layouts.get(streams)
        if layout is None:
            missing = [name for name in streams if name not in self.lengths]
            if missing:
                raise UnknownStreamError(
                    f"stream {missing[0]!r} is used before any planned argument defined its length. Name one that an argument is "
                    "split as, and put what defines it before what uses it."
                )
            splits = tuple(self._splits.get(name, CONTIGUOUS) for name in streams)
            layout = joint_layout(
                tuple(self.lengths[name] for name in streams),
                self.world_size,
                () if set(splits) == {CONTIGUOUS} else splits,
                self.shares,
            )
            self._layouts[streams] = layout
        return layout

    def knows(self, streams: tuple[str, ...]) -> bool:
        """Whether the lengths of all of them are known."""
        return streams in self._layouts or all(name in self.lengths for name in streams)

    def define(self, stream: str, length: int, split: Split = CONTIGUOUS) -> None:
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
        """Return `make()`, computed once per call for the object `source`.

        A tensor that is changed in place counts as another one. Of one that was made in inference mode torch does not say whether
        it was, so what is made of it is computed every time; ranks compute under `torch.no_grad`.
        """
        counts = versions(tensors(source))
        if counts is None:
            return make()
        slot = (key, id(source), counts)
        if slot not in self._memo:
            self._memo[slot] = (source, make())
            if len(self._memo) > REMEMBERED:
                del self._memo[next(iter(self._memo))]
        return self._memo[slot][1]

    def close(self) -> None:
        """The call has ended: let go of every tensor, and of the call itself. Lengths and layouts stay, for reports."""
        self.arguments = {}
        self.masked.clear()
        self._memo.clear()
        self._around.clear()
        self._gather = None
