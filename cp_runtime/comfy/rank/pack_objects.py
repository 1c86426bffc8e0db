"""The forwards behind object patches of node packs, on a rank: this rank's tokens, and all heads, pass through them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from comfy.ldm.flux.math import apply_rope1
from comfy.ldm.modules.attention import optimized_attention
from comfy.model_management import supports_fp64
from torch import Tensor, nn

from ...engine.call import RunningCall
from ...engine.compiled import AS_THEY_ARE
from ..shared.pack_objects import CHUNKS, ENHANCE, NAG, RIFLEX

Forward = Callable[..., Tensor]


@contextmanager
def objects_in_place(encoded: Mapping[str, Any], model: nn.Module, call: RunningCall) -> Iterator[None]:
    """Replace the forwards of a model's modules according to object patches, while active.

    Blocks with such modules are not compiled: the replacement is a new function in every call.
    """
    with ExitStack() as undo:
        for path, index in encoded["places"].items():
            entry = encoded["entries"][index]
            module = path.removesuffix(".forward")
            for above in _above(module, model):
                AS_THEY_ARE.add(above)
                undo.callback(AS_THEY_ARE.discard, above)
            patched = model.get_submodule(module)
            patched.forward = functools.partial(_FORWARDS[entry["name"]], patched, call, **entry["data"])
            undo.callback(delattr, patched, "forward")
        yield


def _above(path: str, model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules around the one at a path, without the model."""
    parts = path.split(".")
    return (model.get_submodule(".".join(parts[:count])) for count in range(1, len(parts)))


def _guided(
    module: Any,
    call: RunningCall,
    x: Tensor,
    context: Tensor,
    context_img_len: int | None = None,
    transformer_options: Any = None,
    *,
    nag_context: Tensor,
    i2v: bool,
    input_type: str,
    **guidance: Any,
) -> Tensor:
    """Cross-attention of Wan under normalised attention guidance (NAG), arXiv 2505.21179. Norms are over the channels of a token,
    so a rank computes its tokens alone.

    Args:
        x: `[B, L of this rank, C]`.
        context: `[B, text, C]`, in image-to-video with `context_img_len` tokens of an image in front.
        nag_context: `[1, text, C]`, the negative guidance.
    """
    attend = functools.partial(_attend, module, transformer_options=transformer_options)
    image: Any = 0
    if i2v:
        q = module.norm_q(module.q(x))
        keys, values = context[:, :context_img_len], context[:, :context_img_len]
        image = optimized_attention(
            q, module.norm_k_img(module.k_img(keys)), module.v_img(values), heads=module.num_heads,
            transformer_options=transformer_options,
        )  # fmt: skip
        context = context[:, context_img_len:]
    # As the node does it: one item, or any number of type "batch", is guided whole; else the first half of the items.
    halves = context.shape[0] == 2 if i2v else input_type == "default" and context.shape[0] > 1
    guided, other = x.chunk(2) if halves else (x, None)
    texts = context.chunk(2) if halves else (context,)
    if input_type == "batch" and not i2v:
        nag_context = nag_context.repeat(guided.shape[0], 1, 1)
    q = module.norm_q(module.q(guided))
    out = _normalised(attend(q, texts[0]), attend(q, nag_context), **guidance)
    if other is not None:
        out = torch.cat([out, attend(module.norm_q(module.q(other)), texts[1])])
    return module.o(out + image if i2v else out)


def _attend(module: Any, q: Tensor, context: Tensor, transformer_options: Any) -> Tensor:
    k, v = module.norm_k(module.k(context)), module.v(context)
    return optimized_attention(q, k, v, heads=module.num_heads, transformer_options=transformer_options).flatten(2)


def _normalised(toward: Tensor, away: Tensor, nag_scale: float, nag_alpha: float, nag_tau: float, inplace: bool) -> Tensor:
    """Extrapolate from `away` to `toward`, up to `nag_tau` times the norm, and mix with `toward`. `inplace`: node's rounding."""
    rest = nag_scale - 1
    out = away.mul_(rest).neg_().add_(toward, alpha=nag_scale) if inplace else toward * nag_scale - away * rest
    norm, reached = (t.norm(p=1, dim=-1, keepdim=True) for t in (toward, out))
    too_far = torch.nan_to_num(reached / norm, nan=10.0) > nag_tau
    out.mul_(torch.where(too_far, norm * nag_tau / (reached + 1e-7), 1.0))
    if inplace:
        return out.sub_(toward).mul_(nag_alpha).add_(toward)
    return out * nag_alpha + toward * (1 - nag_alpha)


def _enhanced(
    module: Any,
    call: RunningCall,
    x: Tensor,
    freqs: Tensor,
    transformer_options: Any = None,
    *,
    num_frames: int,
    enhance_weight: float,
) -> Tensor:
    """Self-attention of Wan whose output is scaled by how much frames attend to each other: Enhance-A-Video."""
    B, L, H, D = *x.shape[:2], module.num_heads, module.head_dim
    q, k = (apply_rope1(norm(project(x)).view(B, L, H, D), freqs) for norm, project in
            ((module.norm_q, module.q), (module.norm_k, module.k)))  # fmt: skip
    factor = _between_frames(call, q, k, num_frames) * (num_frames + enhance_weight)
    out = optimized_attention(
        q.view(B, L, H * D), k.view(B, L, H * D), module.v(x), heads=H, transformer_options=transformer_options
    )
    out = module.o(out)
    out *= factor.clamp(min=1)
    return out


def _between_frames(call: RunningCall, q_BLHD: Tensor, k_BLHD: Tensor, frames: int) -> Tensor:
    """Return the mean attention between two different frames, at the same position in both, over all positions, heads and items.

    A position's tokens are on several ranks: as in Ulysses, each rank gets all tokens of its share of the heads, from one exchange.
    The sums over these heads are gathered and added up in the order of the ranks, so that all ranks get the same number.
    """
    heads, (q_BHCD, k_BHCD) = q_BLHD.shape[2], call.to_heads([q_BLHD, k_BLHD])
    B, own, C, D = q_BHCD.shape
    if C % frames:
        raise ValueError(
            f"Enhance-A-Video: {C} tokens are not {frames} frames of as many tokens each. Connect the latent that is sampled."
        )
    q, k = (t.unflatten(2, (frames, -1)).transpose(2, 3) for t in (q_BHCD, k_BHCD))  # [B, heads, positions, frames, D]
    scores = ((q * D**-0.5) @ k.mT).float().softmax(-1)
    same = scores.diagonal(dim1=-2, dim2=-1)
    total = (scores.sum() - same.sum()) if own else scores.new_zeros(())
    if call.mesh.size > 1 and not call.attention_is_local:
        (sums,) = call.mesh.whole.all_gather([total.reshape(1)], [1] * call.mesh.size, 0)
        total = sums.sum()
    pairs = frames * frames - frames
    return total / (math.prod((B, heads, C // frames)) * pairs)


def _in_chunks(module: Any, call: RunningCall, x: Tensor, *, num_chunks: int, dim_threshold: int) -> Tensor:
    """Run a feed-forward network on some tokens of this rank at a time."""
    run = functools.partial(type(module).forward, module)
    return torch.cat(list(map(run, x.chunk(num_chunks, 1))), 1) if x.shape[1] > dim_threshold else run(x)


def _extended(module: Any, call: RunningCall, ids: Tensor, *, num_frames: int, k: int, **_: Any) -> Tensor:
    """Rotations `[B, 1, L, frequencies, 2, 2]` at positions `ids` `[B, L, axes]`, in which the k-th frequency of time turns by less
    than a whole period in the video: RIFLEx, arXiv 2502.15894."""
    out: Tensor = type(module).forward(module, ids)
    place = ids.device if supports_fp64(ids.device) else torch.device("cpu")
    angle = ids[..., 0].float().to(place) * torch.tensor(0.9 * 2 * torch.pi / num_frames, dtype=torch.float64, device=place)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
    out[..., k - 1, :, :] = turn.unsqueeze(1).to(out.device, out.dtype)
    return out


_FORWARDS: Mapping[str, Forward] = {NAG: _guided, ENHANCE: _enhanced, CHUNKS: _in_chunks, RIFLEX: _extended}
