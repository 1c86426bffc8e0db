"""Kernels of a card: attention is the formula, returned in the forms of torch's CUDA kernels.

Ranks measure a card with products that take a CPU seconds, and look at nothing but the clock. These give nan at once.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import Kind

HALF = (torch.float16, torch.bfloat16)
TOO_LARGE = 1 << 30  # multiplications
aten = torch.ops.aten
kinds: list[Kind] = []
"""Of the cards, by their numbers."""
FLASH = aten._scaled_dot_product_flash_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
WHOLE = aten.scaled_dot_product_attention.default
AMPERE, ADA = (8, 0), (8, 9)


def check(func: Any, card: int, operands: list[Tensor]) -> None:
    """Raise where a card is too old for a kernel."""
    capability = kinds[card].capability
    if func is FLASH and capability < AMPERE:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if func is CUDNN and capability < AMPERE:
        raise RuntimeError("cuDNN Frontend error: No valid engine configs")
    if func is EFFICIENT and capability < AMPERE and any(each.dtype is torch.bfloat16 for each in operands):
        raise RuntimeError("cutlassF: no kernel found to launch!")
    if func is aten._scaled_mm.default and capability < ADA:
        raise RuntimeError(
            "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+"
        )


def _supports(tensor: Tensor) -> bool:
    return kinds[tensor.device.index].capability >= AMPERE


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp. A row without visible keys is nan, as a softmax over nothing; one whose scores are no float32
    any more in base 2 is 0, with inf, as an H200 gave it."""
    if q.numel() * k.shape[2] > TOO_LARGE:
        return torch.full_like(q, torch.nan), q.new_full(q.shape[:3], torch.nan, dtype=torch.float32)
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.float()
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ v.float()
    beyond = (scores.amax(-1) * math.log2(math.e)).isinf() & lse.isfinite()
    out, lse = out.masked_fill(beyond.unsqueeze(-1), 0.0), lse.masked_fill(beyond, torch.inf)
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse  # these kernels write [B, L, H, D]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _plain(dropout_p, is_causal)
    if q.dtype not in HALF or q.shape[-1] % 8:
        raise RuntimeError(f"FlashAttention takes half precision and head sizes in eights: {q.dtype}, {q.shape[-1]}")
    out, lse = _attend(q, k, v, None, scale)
    none = torch.empty(0)
    return out, lse, none, none, q.shape[2], k.shape[2], none, none, none


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_log_sumexp: bool, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _plain(dropout_p, is_causal, compute_log_sumexp)
    _aligned(bias)
    out, lse = _attend(q, k, v, bias, scale)
    rows = -(-q.shape[2] // 32) * 32
    padded = lse.new_full((*lse.shape[:2], rows), torch.inf)
    padded[..., : lse.shape[2]] = lse
    return out, padded, torch.empty(0), torch.empty(0)


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_log_sumexp: bool, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _plain(dropout_p, is_causal, compute_log_sumexp)
    _aligned(bias)
    out, lse = _attend(q, k, v, bias, scale)
    none = torch.empty(0)
    return out, lse.unsqueeze(-1), none, none, q.shape[2], k.shape[2], none, none, none


def _plain(dropout: float, is_causal: bool, with_lse: bool = True) -> None:
    if dropout or is_causal or not with_lse:
        raise NotImplementedError("the stand-in for this kernel has no dropout, no causal mask, and always a log-sum-exp")


def _aligned(bias: Tensor | None) -> None:
    """What the kernels want of a mask: rows that lie close, each from an aligned address on."""
    if bias is None:
        return
    *steps, step = bias.stride()
    if (step != 1 and bias.shape[-1] > 1) or any(number % 8 for number in (bias.storage_offset(), *steps)):
        raise RuntimeError(f"attn_bias is not correctly aligned: strides {bias.stride()}, offset {bias.storage_offset()}")


def _whole(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Tensor:
    if q.numel() * k.shape[2] > TOO_LARGE:
        return torch.full_like(q, torch.nan)
    out: Tensor = WHOLE(q, k, *rest, **options)
    return out


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.ndim == b.ndim == 2 and a.numel() * b.shape[1] > TOO_LARGE:
        return a.new_full((a.shape[0], b.shape[1]), torch.nan)
    return a @ b


KERNELS: dict[Any, Callable[..., Any]] = {
    FLASH: _flash,
    EFFICIENT: _efficient,
    CUDNN: _cudnn,
    WHOLE: _whole,
    aten.mm.default: _product,
    aten.matmul.default: _product,
}


_library = torch.library.Library("aten", "IMPL")


@functools.cache  # torch takes one kernel for it
def whole_attention(kind: str) -> None:
    """Keep torch from taking its attention apart outside inference mode: it would ask the driver for a kernel."""

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out: Tensor = WHOLE(*args, **kwargs)
        return out

    key = {"cuda": "CUDA", "xpu": "XPU", "npu": "PrivateUse1"}[kind]
    _library.impl("scaled_dot_product_attention", attention, f"Autograd{key}")


class Params:
    """`torch.backends.cuda.SDPAParams`."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool) -> None:
        self.q, self.k, self.mask = q, k, mask


def can_use_flash(params: Params, debug: bool = False) -> bool:
    """Half precision without a mask, since Ampere."""
    return (
        _supports(params.q)
        and params.q.dtype in HALF
        and params.mask is None
        and params.q.shape[-1] <= 256
        and params.q.shape[-1] % 8 == 0
    )


def can_use_cudnn(params: Params, debug: bool = False) -> bool:
    """Half precision, since Ampere."""
    return _supports(params.q) and params.q.dtype in HALF and params.q.shape[-1] <= 128


def can_use_efficient(params: Params, debug: bool = False) -> bool:
    """Always, but bfloat16 since Ampere."""
    return _supports(params.q) or params.q.dtype is not torch.bfloat16
