"""Stages of a model: each rank computes consecutive blocks, with the model's forward.

Every rank runs the whole forward. A block of another stage is *skipped*: it returns zeros in the form of its outputs, or, where a
block of this stage or the result depends on them, the tensors received from the block's stage. So everything between blocks runs on
every rank, and is right wherever it is needed. The first rank is the last stage: it has the result, and the others return a value
of the same form.

The messages follow from a *survey* of each form of a call: the forward with all blocks skipped and outputs of NaN. The blocks that
a NaN reaches, and the result if it is reached, depend on it. Before that, one block of each kind runs, to learn which of its inputs
have the form of its outputs.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import PlanError
from ...nested import form_of, leaves, map_tensors, tensors
from ..call import RunningCall
from ..plan import ShardingPlan, find_modules, method_of
from ..ranks.collectives import Pending, RankGroup
from ..ranks.sharding import Shares
from ..weights.blocks import Block, blocks_of
from ..weights.packing import Packing

PLAIN = (type(None), bool, int, float, str)

Run = Callable[[], Any]


class StagedCall(RunningCall):
    """A call of a stage, whose blocks may be without attention."""

    def check_attention(self) -> None:
        pass


def staged_blocks(model: nn.Module, plan: ShardingPlan) -> list[Block]:
    """Return the blocks to divide into stages: those in the plan, in the model's order.

    Raises PlanError if the model calls another method of them than forward.
    """
    for pattern in plan.modules:
        if method_of(pattern) != "forward":
            raise PlanError(f"{plan.origin}: the model calls {method_of(pattern)} of its blocks, which cannot be skipped.")
    planned = [name for pattern in plan.modules for name, _ in find_modules(model, pattern)]
    return [b for b in blocks_of(model) if any(name == b.name or name.startswith(f"{b.name}.") for name in planned)]


def cut(sizes: Sequence[int], stages: int, shares: Shares = ()) -> list[int]:
    """Return the stage of every block, given the blocks' bytes: consecutive blocks, with bytes in proportion to the stage's share.
    Raises PlanError if there are fewer blocks than stages."""
    if len(sizes) < stages:
        raise PlanError(f"{len(sizes)} blocks are not enough for {stages} stages. Use fewer stages.")
    weights = shares or (1,) * stages
    ends = [sum(weights[: stage + 1]) / sum(weights) * sum(sizes) for stage in range(stages)]
    found: list[int] = []
    for number, size in enumerate(sizes):
        middle = sum(sizes[:number]) + size / 2
        wanted = sum(middle >= end for end in ends[:-1])
        before = found[-1] if found else -1
        # Never an earlier stage than the block before, never more than one later, and as many blocks left as stages.
        found.append(min(max(wanted, before, stages - len(sizes) + number), before + 1))
    return found


class Form(NamedTuple):
    """The outputs of a block.

    Args:
        like: the outputs, with empty tensors.
        parts: for each tensor the index of an input of its form, or, without such an input, its shape and dtype.
    """

    like: Any
    parts: tuple[int | tuple[torch.Size, torch.dtype], ...]

    def filled(self, inputs: Sequence[Tensor], value: float) -> Any:
        """Return outputs filled with one value; integers, such as lengths, are those of the input."""
        parts = iter(self.parts)

        def fill(_: Tensor) -> Tensor:
            part = next(parts)
            if isinstance(part, int):
                like, contiguous = inputs[part], torch.contiguous_format  # a message may arrive there
                floats = like.is_floating_point()
                return torch.full_like(like, value, memory_format=contiguous) if floats else like.clone(memory_format=contiguous)
            shape, dtype = part
            return torch.full(shape, value if dtype.is_floating_point else 0, dtype=dtype, device=inputs[0].device)

        return map_tensors(self.like, fill)


class Visit(NamedTuple):
    """One run of a block in a forward. `needed`: other stages that need its outputs."""

    block: int
    form: Form
    needed: frozenset[int]


Arriving = list[tuple[int, torch.Size, torch.dtype]]
"""The tensors a run receives, in order: sending stage, shape, dtype. Empty = still unknown."""


class Stages:
    """The stages of a model, of which this rank is one.

    Args:
        blocks: see `staged_blocks`.
        owners: stage of every block.
        group: a rank of each stage; nobody else sends on its process group. The first one is the last stage.
        lent: gives a block weights of any value while active, where this rank has none.

    Attributes:
        place: index of the current or last run of a block; -1 before the first.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        owners: list[int],
        group: RankGroup,
        lent: Callable[[Block], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._blocks, self._owners, self._group, self._lent = blocks, owners, group, lent
        self.stage = group.size - 1 - group.rank  # rank 0 ends with the result, where the controller takes it
        self.place = -1
        self._forms: dict[object, Form] = {}
        self._at: Callable[..., Any] | None = None
        self._sent: list[Pending] = []
        self._coming: deque[tuple[Tensor, Pending]] = deque()
        self._ahead = 0  # runs, from the current one on, all of whose tensors are among these

    @property
    def own_blocks(self) -> int:
        return self._owners.count(self.stage)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Replace the blocks' forward while active, and wait for the sends at the end."""
        stock = [vars(block.module).get("forward") for block in self._blocks]
        for number, block in enumerate(self._blocks):
            block.module.forward = partial(self._visit, number, block.module.forward)
        try:
            yield
        finally:
            for block, forward in zip(self._blocks, stock, strict=True):
                del block.module.forward
                if forward is not None:
                    block.module.forward = forward
            sent, self._sent, self._ahead = self._sent, [], 0
            self._coming.clear()
            for pending in sent:  # also where all ranks leave the call: later stages still receive it
                pending.wait()

    def survey(self, run: Run) -> list[Visit]:
        """Return the runs of blocks in a forward, and the stages that need them. Only in a `call`; `run`: without peers."""
        order = self._surveyed(run, ())[0]
        owners = [self._owners[number] for number, _ in order]
        last = self._group.size - 1

        def needed(users: Collection[int], owner: int) -> frozenset[int]:
            return frozenset({last if user == len(order) else owners[user] for user in users} - {owner})

        # As a rule a block depends on the one before it, and on no other.
        chain = [needed({place + 1}, owner) for place, owner in enumerate(owners)]
        # One forward per border between stages checks that; only models with other dependencies need one per block.
        ends = [place for place, stages in enumerate(chain) if stages]
        if any(max(self._surveyed(run, range(end))[1], default=0) > end for end in ends):
            chain = [needed(self._surveyed(run, (place,))[1], owner) for place, owner in enumerate(owners)]
        return [Visit(number, form, stages) for (number, form), stages in zip(order, chain, strict=True)]

    def check_parts(self, visits: Sequence[Visit]) -> None:
        """Raise PlanError if no tensor can stand in for a block's outputs where a run has a part of the survey's tokens."""
        for block in (visit.block for visit in visits if not all(isinstance(part, int) for part in visit.form.parts)):
            raise PlanError(
                f"{self._blocks[block].name} returns a tensor in whose form it takes none: nothing can stand in for a part of it. "
                "Use one rank per stage, and one patch."
            )

    def run(
        self, visits: Sequence[Visit], run: Run, arriving: Sequence[Arriving] = (), follows: Callable[[], bool] = lambda: True
    ) -> Any:
        """Run the forward, and return its result, which is right on the last stage. Only in a `call`.

        Over gloo a run after the first of its kind receives while this rank still computes the previous one: a message is only in
        flight once its receiver has asked for it. NCCL has one stream per group for point-to-point messages: there all ranks send
        and receive in the order of the blocks.

        Args:
            visits: of the survey.
            arriving: tensors that this run and the later ones of the call receive; filled in for this one. Empty = ask as late as
                possible.
            follows: whether the next run is sure to take place, asked after this one has begun.
        """
        received: Arriving = []

        def at(block: int, stock: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self.place >= len(visits) or visits[self.place].block != block:
                raise PlanError(f"{self._blocks[block].name} ran in another order than in a call of the same form.")
            visit, owner = visits[self.place], self._owners[block]
            if self.place == 0 and self._group.via_host:  # other backends: a waiting receive blocks the messages behind it
                self._post_receives(arriving, follows, next(tensors((args, kwargs))).device)
            if owner == self.stage:
                out = stock(*args, **kwargs)
                for to in sorted(visit.needed):
                    for tensor in filter(Tensor.numel, tensors(out)):  # a copy, as the model may modify it later
                        self._sent.append(self._group.send(tensor.clone(memory_format=torch.contiguous_format), self._rank(to)))
                return out
            out = visit.form.filled(list(tensors((args, kwargs))), 0.0)
            for tensor in filter(Tensor.numel, tensors(out)) if self.stage in visit.needed else ():
                # In the order of the blocks, in which their stages send: messages between two ranks match by order.
                received.append((owner, tensor.shape, tensor.dtype))
                target, pending = (
                    self._coming.popleft() if self._coming else (tensor, self._group.receive(tensor, self._rank(owner)))
                )
                pending.wait()
                if target is not tensor:
                    tensor.copy_(target)
            return out

        out = self._pass(at, run)
        self._ahead = max(0, self._ahead - 1)
        if arriving:
            arriving[0][:] = received
        return out

    def _post_receives(self, arriving: Sequence[Arriving], follows: Callable[[], bool], device: torch.device) -> None:
        """Start receiving the tensors of this run and the next one, as far as they are known and not in flight."""
        for each in arriving[self._ahead : 2 if follows() else 1]:
            if not each:
                return
            for owner, shape, dtype in each:
                target = torch.empty(shape, dtype=dtype, device=device)
                self._coming.append((target, self._group.receive(target, self._rank(owner))))
            self._ahead += 1

    def _rank(self, stage: int) -> int:
        return self._group.size - 1 - stage

    def _surveyed(self, run: Run, poisoned: Collection[int]) -> tuple[list[tuple[int, Form]], list[int]]:
        """Return (block, form) of every run of a block, and the runs that a NaN output of `poisoned` reaches, the result last."""
        order: list[tuple[int, Form]] = []
        reached: list[list[Tensor]] = []

        def at(block: int, stock: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            form = self._form(block, stock, args, kwargs)
            inputs = list(tensors((args, kwargs)))
            reached.append([tensor.isnan().any() for tensor in inputs if tensor.is_floating_point()] if poisoned else [])
            order.append((block, form))
            return form.filled(inputs, torch.nan if self.place in poisoned else 0.0)

        out = self._pass(at, run)
        reached.append([tensor.isnan().any() for tensor in tensors(out)])
        return order, [place for place, flags in enumerate(reached) if any(map(bool, flags))]

    def _pass(self, at: Callable[..., Any], run: Run) -> Any:
        self._at, self.place = at, -1
        try:
            return run()
        finally:
            self._at = None

    def _visit(self, number: int, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.place += 1
        return stock(*args, **kwargs) if self._at is None else self._at(number, stock, args, kwargs)

    def _form(self, number: int, stock: Callable[..., Any], args: Any, kwargs: Any) -> Form:
        """Return the form of a block's outputs for these inputs. The first block of a kind runs."""
        block, inputs = self._blocks[number], list(tensors((args, kwargs)))
        key = type(block.module), len(block.slots), form_of([*block.weights, *inputs])
        if key not in self._forms:
            forms = [(tensor.shape, tensor.dtype) for tensor in inputs]
            with self._lent(block):
                out = stock(*args, **kwargs)
            for leaf in leaves(out):
                if not isinstance(leaf, (Tensor, *PLAIN)):
                    raise PlanError(f"{block.name} returns a {type(leaf).__name__}, for which nothing can stand in.")

            def part(tensor: Tensor) -> int | tuple[torch.Size, torch.dtype]:
                form = tensor.shape, tensor.dtype
                same = next((i for i, value in enumerate(inputs) if value is tensor), None)
                return (forms.index(form) if form in forms else form) if same is None else same

            self._forms[key] = Form(map_tensors(out, lambda tensor: tensor.new_empty(0)), tuple(map(part, tensors(out))))
        return self._forms[key]


class StagedWeights:
    """The blocks of a model, of which this rank has the weights of one stage only.

    Args:
        blocks, owners: as for `Stages`.
        stage: of this rank.
        device: where the model computes.
        remedy: advice for a user whose model cannot run like this; part of messages.
    """

    def __init__(self, blocks: Sequence[Block], owners: list[int], stage: int, device: torch.device, remedy: str) -> None:
        self.blocks, self.owners, self.stage = blocks, owners, stage
        self._device, self._remedy = device, remedy
        self._packings: dict[str, Packing] = {}

    @property
    def others(self) -> list[Block]:
        return [block for block, owner in zip(self.blocks, self.owners, strict=True) if owner != self.stage]

    def leave_out(self) -> None:
        """Drop the weights of other stages' blocks. Reads of their numbers are refused from now on."""
        for block in self.others:
            self._packings[block.name] = Packing(block.weights)
            self._put_absent(block)

    @contextlib.contextmanager
    def lent(self, block: Block) -> Iterator[None]:
        """Give a block of another stage zeros for weights while active."""
        packing = self._packings.get(block.name)
        if packing is None:
            yield
            return
        with torch.inference_mode(False), torch.no_grad():
            block.put(packing.views(torch.zeros(packing.nbytes, dtype=torch.uint8, device=self._device)))
        try:
            yield
        finally:
            self._put_absent(block)

    def _put_absent(self, block: Block) -> None:
        with torch.inference_mode(False), torch.no_grad():
            block.put(self._packings[block.name].absent(self._device, list(block.slots), self._remedy))

    def remove(self) -> None:
        """Drop all state. The blocks of other stages have no weights until their slots are filled."""
        self._packings.clear()
