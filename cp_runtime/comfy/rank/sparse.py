"""ComfyUI's Model Sparse Attention on this rank's heads.

Its methods choose blocks of keys for each head by itself. After Ulysses' exchange a rank has all tokens of its heads, so ComfyUI's
own code selects there what it selects on one device. MiniMax-H3's blocks, which the node replaces on one device to project and
quantise in parts, stay as they are: their attention goes to the same kernel.

Shape suffixes: B batch, H heads of this rank, T all tokens, D head dimension; P tokens in padded tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

from torch import Tensor, nn

from ...engine.call import RunningCall


class SparseAttention:
    """The node's attention in one call. `settings`: of its `SparseAttnPatch`."""

    def __init__(self, settings: Mapping[str, Any], call: RunningCall) -> None:
        from comfy_extras import nodes_sparse_attention  # since 0.36

        self._node: Any = nodes_sparse_attention
        self._patch, self._call = _patch(self._node, tuple(sorted(settings.items()))), call
        self._tiles: tuple[Any, Tensor | None] | None = None  # layout and gate of the attention that comes next

    def over(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the attention function that attends as the node does, and calls `function` where that attends to all tokens."""
        return partial(self._in_tiles if self._patch.vsa else self._node.make_attention_override(self._patch, None), function)

    @contextmanager
    def gates(self, model: nn.Module) -> Iterator[None]:
        """Compute the gates of Video Sparse Attention when MiniMax-H3's layers are called, while active."""
        blocks: Any = getattr(model, "blocks", ()) if self._patch.vsa else ()
        hooks = [
            block.attn.register_forward_pre_hook(partial(self._before, index), with_kwargs=True)
            for index, block in enumerate(blocks)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, index: int, layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        x, options = args[0], kwargs["transformer_options"]
        layout = options["minimax_h3_layout"]
        whole = x.new_empty(layout.seq_len, 0)  # for the node's conditions: number of all tokens, dtype and device
        self._tiles = None
        if self._node.h3_eligible(layer, whole, kwargs.get("rope_freqs"), options, self._patch, index):
            gate = layer.to_gate_compress
            if gate is not None:
                (gate,) = self._call.to_heads([gate(x).view(1, -1, layer.heads, layer.head_dim)])
            self._tiles = layout, gate

    def _in_tiles(self, function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attend as the node's producer of MiniMax-H3 does, given all of q, k and v `[B, H, T, D]`."""
        if self._tiles is None:
            return function(q, k, v, *args, **kwargs)
        (layout, gate_BHTD), self._tiles = self._tiles, None
        plan = self._patch.vsa_plan(layout, q.device)
        source, prefix = plan["src"], [0, plan["n_prefix"]]
        live = (source >= 0).to(q.dtype)[:, None]

        def tiles(x_BHTD: Tensor) -> Tensor:
            x_BHPD = x_BHTD.index_select(2, source.clamp_min(0)) * live
            return x_BHPD.transpose(1, 2).contiguous()

        out_BPHD = self._node.ck.sol_attn(
            *map(tiles, (q, k, v)), tau=self._patch.tau, topk_ratio=self._patch.topk_ratio, token_aug=self._patch.extra_tokens,
            sink_blocks=prefix, sink_q=prefix, tail=False, block_len=plan["block_len"],
            coarse_gate=None if gate_BHTD is None else tiles(gate_BHTD),
        )  # fmt: skip
        out_BTHD = out_BPHD.index_select(1, plan["inv"])
        return out_BTHD.transpose(1, 2) if kwargs.get("skip_output_reshape") else out_BTHD.flatten(2)


@lru_cache(maxsize=1)
def _patch(node: Any, settings: tuple[tuple[str, Any], ...]) -> Any:
    """Return the node's patch, which caches orders of tokens between calls."""
    made = {name: set(value) if isinstance(value, tuple) else value for name, value in settings}
    return node.SparseAttnPatch(**made)
