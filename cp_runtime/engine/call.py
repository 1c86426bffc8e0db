"""One sharded call of a model: its state, and the attention and gathers inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import PlanError, UnknownStreamError
from .attention.context_parallel import Attend, context_parallel_attention, ordered
from .attention.ulysses import HeadExchange
from .cost import AttentionShape, attention_shape
from .plan import ModulePlan, ShardingPlan
from .ranks.config import ContextParallelConfig
from .ranks.mesh import SequenceMesh
from .ranks.profiling import trace_range
from .ranks.sharding import JointLayout
from .state import AttentionStreams, CallState
from .transforms import ContextParallelOutput, Transform

Planner = Callable[[AttentionShape], ContextParallelConfig]
"""Degrees and method of an attention. Every rank must get the same answer."""


class Scope(NamedTuple):
    """Candidate streams of the attention at a point of the forward.

    Args:
        streams: possible combinations; empty = no communication.
        derived: from argument names, not from the plan.
        name: name of the module.
        by_plan: the plan names the streams, even if there are none.
        shared_before: number of shared attentions when the scope began.
        range: profiler range, open until the scope is left.
    """

    streams: Sequence[AttentionStreams]
    derived: bool = False
    name: str = ""
    by_plan: bool = True
    shared_before: int = 0
    range: AbstractContextManager[Any] = nullcontext()


class Blocks(Protocol):
    """Runs blocks on this rank's tokens inside code that has all of them."""

    def enter(self, name: str, values: Any) -> None:
        """Enter a block with these arguments."""

    def split(self, values: Any, plan: ModulePlan) -> Any:
        """Return this rank's tokens of the arguments that a block's plan does not name."""

    def leave(self, name: str, out: Any) -> Any:
        """Leave a block; return all tokens of its output."""


class RunningCall:
    """A call from beginning to end. Only the values that transforms put into `kept` outlive it.

    Args:
        plan, kept: see `InstalledPlan`.
        model_name: name for messages.
        mesh, planner, on_module: see `InstalledPlan.call`.
        after_attention: called after the launch of an attention and its exchanges.

    Attributes:
        state: streams, lengths and layouts.
        ask: called before the ranks exchange tokens; if set, they also compare masks, for which they wait for the device.
        in_joint_order: attention functions get all tokens in the order of one process: some depend on positions.
        expects_attention: it is an error if none is shared.
        blocks: runs blocks on this rank's tokens inside code that has all of them.
        entered: the blocks that run so now, by name.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        model_name: str,
        mesh: SequenceMesh,
        planner: Planner,
        on_module: Callable[[], None] | None = None,
        kept: dict[object, Any] | None = None,
        after_attention: Callable[[], None] | None = None,
    ) -> None:
        self.mesh = mesh
        self.state = CallState(mesh.rank, mesh.size, self.gather, kept, mesh.shares)
        self._plan, self._model_name, self._planner, self._on_module = plan, model_name, planner, on_module
        self._after_attention = after_attention
        self._shared = self._turn = 0
        self._scopes = [Scope(plan.attention, plan.attention_rule is not None, by_plan=bool(plan.attention))]
        self.ask: Callable[[], None] | None = None
        self.in_joint_order = False
        self.expects_attention = True
        self.blocks: Blocks | None = None
        self.entered: dict[str, Blocks] = {}

    @property
    def shares(self) -> bool:
        """Whether tokens may be on several ranks."""
        return self.mesh.size > 1

    @property
    def attention_is_local(self) -> bool:
        """Whether attention at this point of the forward needs no communication."""
        return self.state.on_all or not (self.shares and any(map(self.knows, self.scope.streams)))

    @property
    def joint_streams(self) -> list[tuple[str, ...]]:
        """The streams that share an attention, in joint order."""
        modules = (module.attention for module in self._plan.modules.values())
        return list(dict.fromkeys(streams for streams in modules if streams and len(streams) > 1))

    @contextmanager
    def tokens(self, on_all: bool, blocks: Blocks | None = None) -> Iterator[None]:
        """Have modules get all tokens while active, or this rank's. `blocks`: runs those of them that hold tokens."""
        before = self.state.on_all, self.blocks, self.entered
        self.state.on_all, self.blocks, self.entered = on_all, blocks, dict(self.entered)
        self._shared += on_all  # who computes on all tokens has no attention to share
        try:
            yield
        finally:
            self.state.on_all, self.blocks, self.entered = before

    def enter_module(self, name: str, plan: ModulePlan) -> None:
        # A cancel point, which may raise: before anything begins that would have to end.
        if self._on_module is not None:
            self._on_module()
        if plan.separate:
            self.state.begin()
        (streams, derived, _, by_plan, *_), entered = self.scope, trace_range("cp.block", name or self._model_name)
        if plan.attention is not None:
            streams, derived, by_plan = [(plan.attention, plan.keys or plan.attention)] if plan.attention else (), False, True
        entered.__enter__()
        self._scopes.append(Scope(streams, derived, name, by_plan, self._shared, entered))

    def leave_module(self, plan: ModulePlan) -> None:
        self.leave_scope()
        if plan.separate:
            self.state.end()

    def enter_scope(self, streams: Sequence[AttentionStreams], derived: bool = False, name: str = "", by_plan: bool = True) -> None:
        """Set the candidate streams of attention from here on; empty = no communication. See `Scope`."""
        self._scopes.append(Scope(streams, derived, name, by_plan, self._shared))

    def leave_scope(self) -> None:
        self._scopes.pop().range.__exit__(None, None, None)

    @property
    def scope(self) -> Scope:
        return self._scopes[-1]

    def knows(self, streams: AttentionStreams) -> bool:
        return self.state.knows(streams[0]) and self.state.knows(streams[1])

    @property
    def has_attended(self) -> bool:
        """Whether an attention in this scope was shared."""
        return self.scope.shared_before < self._shared

    def local(self, transform: Transform, value: Any, where: str) -> Any:
        """Return this rank's shard of a value; all of it before anything is split, as when a patch skips the first blocks."""
        try:
            return transform(self.state, value, where)
        except UnknownStreamError:
            if self.state.lengths:
                raise
            return value

    def attend(
        self,
        q_BLHD: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
        attend: Attend | None = None,
        kernel: str | None = None,
        causal: bool = False,
        streams: AttentionStreams | None = None,
        own_masks: bool = False,
    ) -> Tensor:
        """Attend over the tokens of all ranks at this point of the forward. See `context_parallel_attention`.

        `streams`: of queries and keys; None = derived from their lengths. `own_masks`: accept a mask made inside the attention,
        over this rank's queries and keys, if it hides padding.
        """
        # In the first call of a form all ranks first agree that each has come here: a rank that failed would leave the others
        # in the exchange.
        if self.ask is not None:
            self.ask()
        with trace_range("cp.attention"):
            self._shared += 1
            if streams is None:
                streams = self._streams(q_BLHD.shape[1], k_BLKD.shape[1], mask)
            q_layout, k_layout = map(self.state.layout, streams)
            mask = self.state.whole_masks.get(streams, self.state.padding.get(streams[1], mask))
            B, _, H, D = q_BLHD.shape
            shape = attention_shape(B, q_layout.total, k_layout.total, H, k_BLKD.shape[2], D, q_BLHD.element_size())
            if attend is not None and self.in_joint_order:
                attend = ordered(attend, q_layout, k_layout)
            sees_keys = None
            if own_masks and mask is not None and mask.dtype == torch.bool and self.mesh.size > 1:
                mask, sees_keys = self._visible_parts(mask, q_layout, k_layout)
            out = self._over_all(
                q_BLHD, k_BLKD, v_BLKD, config=self._planner(shape), q_layout=q_layout, k_layout=k_layout, mask=mask, causal=causal,
                scale=scale, attend=attend, kernel=kernel,
            )  # fmt: skip
        # Behind the exchanges, so that weights of the next block, fetched from here on, do not compete with them for the link.
        if self._after_attention is not None:
            self._after_attention()
        return out if sees_keys is None else out.masked_fill(~sees_keys, 0.0)

    def _over_all(self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, **settings: Any) -> Tensor:
        """Attend to the tokens of all ranks. `settings`: see `context_parallel_attention`."""
        return context_parallel_attention(q_BLHD, k_BLKD, v_BLKD, mesh=self.mesh, once=self.state.once, **settings)

    def owned(self, value: Tensor) -> Tensor:
        """Return a value `[B, tokens, ...]` without the tokens that only stand in on this rank; any other value as it is."""
        state = self.state
        joint = [names for pair in self._scopes[0].streams for names in pair if names]
        for streams in dict.fromkeys([*joint, *((name,) for name in state.lengths)]):
            if value.ndim < 3 or not state.knows(streams):
                continue
            layout = state.layout(streams)
            owned = layout.owned_positions(state.rank, value.device)
            if owned is not None and value.shape[1] == layout.local_lengths[state.rank]:
                return value.index_select(1, owned)
        return value

    def gather(self, value: Tensor, stream: str, dim: int) -> Tensor:
        """All-gather a stream's tokens along `dim`."""
        return self._all_tokens(self._model_name, (stream,), dim, value)

    def gather_joint(self, value: Tensor, streams: tuple[str, ...], dim: int) -> Tensor:
        """All-gather the tokens of streams, in joint order, along `dim`."""
        return self._all_tokens(self._model_name, streams, dim, value)

    def to_heads(self, tensors_BLHD: Sequence[Tensor]) -> list[Tensor]:
        """Exchange tokens of a stream, with all heads, for all tokens of this rank's heads, `[B, heads, tokens, D]`."""
        if self.attention_is_local:
            return [tensor.transpose(1, 2) for tensor in tensors_BLHD]
        first, mesh = tensors_BLHD[0], self.mesh
        layout = self.state.layout(self._streams(first.shape[1], first.shape[1], None)[0])
        owned = layout.owned_positions(self.state.rank, first.device)
        own = tensors_BLHD if owned is None else [tensor.index_select(1, owned) for tensor in tensors_BLHD]
        whole = HeadExchange(mesh.whole, first.shape[2], mesh.shares).to_heads(own, layout.owned_lengths)()
        return [layout.to_joint(tensor, 2) for tensor in whole]

    def whole_output(self, name: str, output: ContextParallelOutput, value: Tensor) -> Tensor:
        """Return a module's output with the tokens of all ranks. `name`: the module, for messages."""
        if output.expected_dims is not None and value.ndim != output.expected_dims:
            raise PlanError(f"{name}: expected an output of {output.expected_dims} dimensions, got {tuple(value.shape)}")
        if output.stream is None:
            raise PlanError(f"{name}: the plan does not say which stream is gathered. Set ContextParallelOutput(stream=...).")
        streams = (output.stream,) if isinstance(output.stream, str) else output.stream
        state, dim = self.state, output.gather_dim
        state.whole.update(streams)
        if not state.lengths:  # nothing was split
            return value
        parts, place = [value], 0
        if output.within:
            sizes = [state.layout((stream,)).local_lengths[state.rank] for stream in output.within]
            if sum(sizes) != value.shape[dim]:
                raise PlanError(
                    f"{name}: dimension {dim} of the output {tuple(value.shape)} is not this rank's {' + '.join(map(str, sizes))} "
                    f"tokens of {' and '.join(output.within)}. Correct within of ContextParallelOutput."
                )
            parts = list(value.split(sizes, dim))
            place = output.within.index(str(output.stream))
        parts[place] = self._all_tokens(name, streams, dim, parts[place])
        return torch.cat(parts, dim) if output.within else parts[place]

    def check_attention(self) -> None:
        """Raise PlanError if tokens were split but no attention was shared."""
        # A module with separate streams may hold no attention, unless the plan says that some module does.
        named = any(module.attention for module in self._plan.modules.values())
        split = self.state.tokens() if named else self.state.lengths
        if self.expects_attention and self.mesh.size > 1 and split and not self._shared and self._plan.shares_attention:
            raise PlanError(
                f"{self._model_name}: tokens were split, but no attention was shared. Attention must go through torch's "
                "scaled_dot_product_attention, or ComfyUI's optimized_attention: matrix products and other libraries are out of "
                "reach."
            )

    def close(self) -> None:
        """End the call, also after an error. This frees its tensors now, not at Python's next garbage collection."""
        while self._scopes:  # left open by modules that raised
            self.leave_scope()
        self.state.close()

    def _visible_parts(self, mask: Tensor, q_layout: JointLayout, k_layout: JointLayout) -> tuple[Tensor, Tensor | None]:
        """Reduce a mask over this rank's queries and keys to its visible keys, `[..., 1, keys]`, and the queries that see any key,
        `[B or 1, queries, H or 1, 1]`. Return any other mask unchanged, with None.

        Raises:
            PlanError: the mask hides some keys from only some queries, so it leaves open whether those see other ranks' keys. Or a
                rank has a single query, and its mask may be meant for the queries of all ranks.
        """
        own = tuple(layout.local_lengths[self.mesh.rank] for layout in (q_layout, k_layout))
        is_own = tuple(mask.shape[-2:]) == own and own[0] not in (1, q_layout.total)
        keys, queries = (mask.any(-2, keepdim=True), mask.any(-1, keepdim=True)) if is_own else (mask, None)
        if self.ask is not None:
            one_by_one = queries is not None and bool((mask != (keys & queries)).any())
            asked = torch.tensor([float(is_own), float(not is_own), float(one_by_one)], device=mask.device)
            of_own, of_all, differs = self.mesh.whole.largest(asked).tolist()
            if of_own and (of_all or differs):
                raise PlanError(
                    f"{self._model_name}: attention mask of shape {tuple(mask.shape)} is for a rank's own queries and keys, and "
                    "hides some keys from some queries only, or a rank has a single query. Pass one for all queries and keys, or a "
                    "row for this rank's keys."
                )
        return keys, None if queries is None else queries[(None,) * (4 - queries.ndim)].transpose(1, 2)

    def next_in_turn(self) -> AttentionStreams:
        """Return the streams of the next attention, where a transform knows in which turn they come."""
        self._turn += 1
        return self.state.in_turn[(self._turn - 1) % len(self.state.in_turn)]

    def _streams(self, queries: int, keys: int, mask: Tensor | None) -> AttentionStreams:
        """Find the streams of queries and keys by their lengths on this rank."""
        state = self.state
        if id(mask) in state.masked:
            return state.masked[id(mask)][1]
        if state.in_turn:
            return self.next_in_turn()
        candidates = list(filter(self.knows, self.scope.streams))
        if len(candidates) == 1:
            return candidates[0]
        held = (queries, keys)
        # By layout, not by name: combinations with the same tokens on every rank are one, whichever name they go by.
        layouts = {(state.layout(q), state.layout(k)): (q, k) for q, k in candidates}
        fitting = [pair for pair in layouts if tuple(layout.local_lengths[state.rank] for layout in pair) == held]
        if len(fitting) == 1:
            return layouts[fitting[0]]
        streams = ", ".join(f"{name} {length}" for name, length in state.lengths.items())
        raise PlanError(
            f"attention with {queries} queries and {keys} keys on rank {state.rank} fits {len(fitting)} combinations of the "
            f"streams ({streams}). Say in the plan what the module attends to: ModulePlan(attention=(...)), or attention=() where "
            "keys and values are replicated."
        )

    def _all_tokens(self, name: str, streams: tuple[str, ...], dim: int, value: Tensor) -> Tensor:
        layout, rank = self.state.layout(streams), self.state.rank
        grid = self.state.grids.get(streams[0])
        if grid is not None:
            value = value.flatten(dim, dim + 2)
        if value.shape[dim] != layout.local_lengths[rank]:
            raise PlanError(
                f"{name}: dimension {dim} of the output {tuple(value.shape)} is not this rank's "
                f"{layout.local_lengths[rank]} tokens of {' and '.join(streams)}"
            )
        owned = layout.owned_positions(rank, value.device)
        if owned is not None:
            value = value.index_select(dim, owned)
        if self.ask is not None:
            self.ask()
        whole = self._gathered(value, layout, dim)  # contiguous, as models may call view on it
        return whole if grid is None else whole.unflatten(dim, grid)

    def _gathered(self, value: Tensor, layout: JointLayout, dim: int) -> Tensor:
        """All-gather along `dim`, given the tokens that this rank contributes; return them in joint order."""
        (whole,) = self.mesh.whole.all_gather([value], layout.owned_lengths, dim)
        return layout.to_joint(whole, dim).contiguous()
