"""PipeFusion: a call whose tokens pass through the stages in patches. Source: Fang et al., "PipeFusion", arXiv 2405.14430.

A patch is a *virtual rank*: with P ranks in a stage and M patches, the plan splits a call as for M * P ranks, and the forward runs
M times, as virtual ranks m * P ... m * P + P - 1. Each attention caches keys and values of all tokens. A patch writes those of its
tokens and attends to all, so those of later patches are stale, from the previous call. The same applies wherever a plan gathers
tokens: patches exchange nothing.

A call of one patch is exact, and fills the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...errors import PlanError
from ..attention.context_parallel import Attend, attend_in_rounds, contributed, held, mask_of_heads, sdpa
from ..attention.ulysses import HeadExchange, repeats
from ..plan import ShardingPlan
from ..ranks.config import EIGHT_BIT
from ..ranks.mesh import SequenceMesh
from ..ranks.sharding import JointLayout, split_sizes
from ..state import CallState
from .stages import StagedCall


class KVCache:
    """Tensors with all tokens that a model keeps between calls, for one conditioning. `allow` is called before the first tensors
    are cached, with the bytes of one attention's keys and values."""

    def __init__(self, allow: Callable[[int], None]) -> None:
        self._allow = allow
        self._whole: dict[object, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._whole.values())

    def put(self, place: object, value: Tensor, layout: JointLayout, ranks: range, dim: int) -> Tensor:
        """Write the tokens that some ranks contribute, one rank after the other along `dim`; return all, in joint order.

        `place`: the point in the forward.
        """
        if place not in self._whole:
            shape = list(value.shape)
            shape[dim] = layout.total
            whole = self._whole[place] = value.new_zeros(shape)
            if len(self._whole) == 2:  # keys and values of the first attention
                self._allow(2 * whole.nbytes)
        whole = self._whole[place]
        whole.index_copy_(dim, layout.positions(ranks, value.device), value)
        return whole


class PatchCall(StagedCall):
    """One patch of a call, by index and number of patches. `kept`: cache of the model and the conditioning. See `RunningCall`."""

    def __init__(
        self, patch: int, patches: int, kept: KVCache, plan: ShardingPlan, name: str, mesh: SequenceMesh, *rest: Any
    ) -> None:
        super().__init__(plan, name, mesh, *rest)
        size = mesh.size
        self.state = CallState(patch * size + mesh.rank, patches * size, self.gather, self.state.kept)
        self.state.gathers = True  # also with one patch, which fills the cache
        self._patch, self._kept, self._gathers = range(patch * size, (patch + 1) * size), kept, 0

    @property
    def shares(self) -> bool:
        return True

    def _over_all(self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, **settings: Any) -> Tensor:
        """Attend from this patch's tokens to all cached tokens."""
        if settings["causal"]:
            raise PlanError(f"{self._model_name}: causal attention cannot run in patches. Use one patch.")
        config, q_layout, k_layout, mask = (settings[name] for name in ("config", "q_layout", "k_layout", "mask"))
        attend: Attend = settings["attend"] or sdpa(settings["scale"])
        rank, size, H, device = self.state.rank, self.mesh.size, q_BLHD.shape[2], q_BLHD.device
        k_owned = k_layout.owned_positions(rank, device)
        q_owned = q_layout.owned_positions(rank, device) if size > 1 else None
        K = k_BLKD.shape[2] * repeats(H, k_BLKD.shape[2], size)
        q_BLHD, k_BLKD, v_BLKD = contributed(q_BLHD, k_BLKD, v_BLKD, q_owned, k_owned, K)
        if mask is not None:
            mask = self._placed(mask, q_layout, k_layout, q_layout.positions(self._patch, device, held=size == 1))

        def over_heads(qkv: list[Tensor], units: tuple[int, int]) -> Tensor:
            q_BHCD, k_BKCD, v_BKCD = qkv
            keys, values = (self._put((name, units), t, k_layout, 2) for name, t in (("keys", k_BKCD), ("values", v_BKCD)))
            return attend(q_BHCD, keys, values, mask_of_heads(mask, units, H, K)) if q_BHCD.shape[1] and q_BHCD.shape[2] else q_BHCD

        if size == 1:
            return over_heads([t.transpose(1, 2) for t in (q_BLHD, k_BLKD, v_BLKD)], (0, K)).transpose(1, 2)
        rounds = min(config.ulysses_rounds, max(split_sizes(K, size)))
        exchanges = [HeadExchange(self.mesh.axes(1, size).ulysses, K, (), index, rounds) for index in range(rounds)]
        owned = slice(self._patch.start, self._patch.stop)
        lengths = q_layout.owned_lengths[owned], k_layout.owned_lengths[owned]
        coded = config.exchange == EIGHT_BIT
        out_BLHD = attend_in_rounds(exchanges, q_BLHD, k_BLKD, v_BLKD, lengths, H // K, over_heads, coded)
        return held(out_BLHD, q_owned, q_layout.local_lengths[rank])

    def _placed(self, mask: Tensor, q_layout: JointLayout, k_layout: JointLayout, rows: Tensor) -> Tensor:
        """Return a mask with this patch's rows, or a single one, and all keys, in joint order."""
        if mask.shape[-2] not in (1, q_layout.total) or mask.shape[-1] not in (
            k_layout.total,
            k_layout.local_lengths[self.state.rank],
        ):
            raise PlanError(
                f"attention mask of shape {tuple(mask.shape)} does not fit: keys must be all {k_layout.total}, or a patch's in one "
                f"row; rows 1 or all {q_layout.total}. A mask is never dropped."
            )
        if mask.shape[-2] != 1:
            mask = mask.index_select(-2, rows)
        elif mask.shape[-1] == k_layout.local_lengths[self.state.rank]:
            owned = k_layout.owned_positions(self.state.rank, mask.device)
            mask = self._fresh("mask", mask if owned is None else mask.index_select(-1, owned), k_layout, mask.ndim - 1)
        return mask

    def _gathered(self, value: Tensor, layout: JointLayout, dim: int) -> Tensor:
        self._gathers += 1
        return self._fresh("tokens", value, layout, dim % value.ndim).clone()  # the model may change it

    def _fresh(self, name: str, value: Tensor, layout: JointLayout, dim: int) -> Tensor:
        """Write the patch's tokens from all ranks of this stage; return all tokens."""
        if self.mesh.size > 1:
            (value,) = self.mesh.whole.all_gather([value], layout.owned_lengths[self._patch.start : self._patch.stop], dim)
        return self._put(name, value, layout, dim)

    def _put(self, name: object, value: Tensor, layout: JointLayout, dim: int) -> Tensor:
        # The point in the forward, which is the same in every call of a form: attentions and gathers so far.
        return self._kept.put((self._shared, self._gathers, name), value, layout, self._patch, dim)
