"""Attention that a model file chooses for a layer, and stand-ins for the kernels: each head computes by itself, block by block."""

import functools
import json

import torch
from torch import nn

from . import attention

BLOCK = 4


def sol_attn(
    q, k, v, tau=1.0, scale=None, sink_blocks=None, sink_q=None, topk_ratio=0.0, tail=True, block_len=None, coarse_gate=None,
    token_aug=0,
):  # fmt: skip
    """`[B, T, H, D]`: a block of queries attends to the blocks of keys whose means fit its own best, to its own, and to sinks."""
    tokens = q.shape[1]
    blocks = -(-tokens // BLOCK)
    place = torch.arange(tokens)
    whole = torch.tensor([min(BLOCK, tokens - start) for start in range(0, tokens, BLOCK)])
    lengths = whole if block_len is None else block_len.clamp(min=1)
    live = place % BLOCK < lengths[place // BLOCK]

    def means(x):
        padded = nn.functional.pad(x * live[:, None, None], (0, 0, 0, 0, 0, blocks * BLOCK - tokens))
        return (padded.unflatten(1, (blocks, BLOCK)).sum(2) / lengths[:, None, None]).transpose(1, 2)

    q_means, k_means = means(q), means(k)
    scores = q_means @ k_means.transpose(-1, -2) * q.shape[-1] ** -0.5
    if topk_ratio:
        kept = scores >= scores.topk(max(1, round(topk_ratio * blocks))).values[..., -1:]
    else:
        kept = scores > scores.mean(-1, keepdim=True) + tau * scores.std(-1, keepdim=True)
    kept |= torch.eye(blocks, dtype=torch.bool)
    kept[..., slice(*(sink_blocks or (0, 0)))] = True
    kept[..., slice(*(sink_q or (0, 0))), :] = True
    seen = kept[..., place // BLOCK, :][..., place // BLOCK] & live
    out = nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen, scale=scale)
    if coarse_gate is not None:
        coarse = scores.softmax(-1) @ means(v)
        out = out + coarse_gate.transpose(1, 2) * coarse[..., place // BLOCK, :]
    return out.transpose(1, 2).contiguous()


def _by_heads(kernel):
    """ComfyUI's signature over a kernel for `[B, T, H, D]`."""

    @attention.wrap_attn
    @functools.wraps(kernel)
    def attend(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
        if mask is not None or kwargs.get("low_precision_attention") is False:
            return attention.attention_pytorch(
                q, k, v, heads, mask=mask, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, **kwargs
            )
        q, k, v = (x.transpose(1, 2) if skip_reshape else x.unflatten(-1, (heads, -1)) for x in (q, k, v))
        out = kernel(q, k, v, **{name: kwargs[name] for name in ("tau", "scale") if name in kwargs})
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    return attend


@_by_heads
def attention_comfy_kitchen_int8(q, k, v, scale=None):
    """Scores of rounded queries and keys; as coarse as four tokens of a block with one scale make it."""

    def rounded(x):
        padded = nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        step = padded.abs().amax((2, 4), keepdim=True).clamp(min=1e-6) / 7
        return ((padded / step).round() * step).flatten(1, 2)[:, : x.shape[1]]

    heads_first = (x.transpose(1, 2) for x in (rounded(q), rounded(k), v))
    return nn.functional.scaled_dot_product_attention(*heads_first, scale=scale).transpose(1, 2)


@_by_heads
def attention_comfy_kitchen_sol(q, k, v, tau=1.0, scale=None):
    return sol_attn(q, k, v, tau, scale) if q.shape == k.shape else _dense(q, k, v, scale)


def _dense(q, k, v, scale):
    return nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale).transpose(1, 2)


class ComfyAttention(nn.Module):
    """The choice of a layer: an entry of the model file beside its weights."""

    def __init__(self):
        super().__init__()
        self.config = self.function = None

    def _load_from_state_dict(self, state_dict, prefix, *args):
        entry = state_dict.pop(prefix + "config", None)
        self.config = None if entry is None else json.loads(bytes(entry.tolist()))
        methods = {
            "comfy_kitchen_int8": attention_comfy_kitchen_int8,
            "comfy_kitchen_sol": functools.partial(attention_comfy_kitchen_sol, tau=(self.config or {}).get("tau", 1.0)),
        }
        self.function = methods[self.config["attention"]] if self.config else None
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.config is not None:
            destination[prefix + "config"] = torch.tensor(list(json.dumps(self.config).encode()), dtype=torch.uint8)
