"""Attention kernels that also return the log-sum-exp of the scores, which ring attention needs for merging.

Each kernel in the registry declares its supported inputs; `attend_with_lse` picks the first suitable one, brings its inputs and
result into a common form, and falls back to float32 matrix products.

| kernel | where | log-sum-exp it returns |
|---|---|---|
| flash_attn | flash-attn is installed and runs on this device, CUDA, half precision | `[B, H, L]` |
| sage | SageAttention 2 installed and runs on this device, CUDA, D up to 128, only on request: it quantises | `[B, H, L]` |
| flash, cudnn | CUDA, half precision; cuDNN first on compute capability 9.0 and 10.0 | `[B, H, L]`, cuDNN `[B, H, L, 1]` |
| efficient | CUDA, masks, float32 | `[B, H, L rounded up to 32]` |
| cpu | CPU | `[B, H, L]` |
| math | everywhere | `[B, H, L]` |

Shape suffixes: B batch, H query heads, K key/value heads, L queries, S keys, D head dimension.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda as switches

from ...compat import load_op
from ...errors import ConfigError, bad_value
from ..ranks.collectives import wait_for

log = logging.getLogger("context_parallel")

Run = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], tuple[Tensor, Tensor]]

HALF = (torch.float16, torch.bfloat16)
MATH_SCORES = 1 << 26  # scores in memory at once in the math kernel: 256 MB in float32
ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
LOWEST = -1e30  # of a mask's finite numbers: CUDA kernels multiply by log2(e), which makes the lowest float32 infinite
BIAS_ALIGNMENT = 16  # elements; CUDA kernels read masks in aligned rows


@dataclass(frozen=True)
class Kernel:
    """An attention function.

    Args:
        name: for users and reports.
        run: `(q_BHLD, k_BHSD, v_BHSD, mask, scale) -> (out_BHLD, lse)`. The mask is additive, in q's dtype, with four dimensions
            that broadcast to `[B, H, L, S]`.
        supports: whether it supports the inputs; the mask may be None.
        on_request: only chosen by name, because its result is not exact.
        allowed: whether torch's switches (`torch.nn.attention.sdpa_kernel`) allow this kind of kernel.
    """

    name: str
    run: Run
    supports: Callable[[Tensor, Tensor, Tensor | None], bool]
    on_request: bool = False
    allowed: Callable[[], bool] = switches.flash_sdp_enabled  # on a CPU, too


def attend_with_lse(
    q_BHLD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention and the log-sum-exp of its scores.

    Args:
        q_BHLD, k_BKSD, v_BKSD: H is a multiple of K; L and S are at least 1.
        mask: boolean (True = visible) or additive, broadcastable to `[B, H, L, S]`.
        scale: factor for the scores; None = 1 / sqrt(D).
        kernel: name of the kernel to use if it supports the inputs; None = the first that does.

    Returns:
        `[B, H, L, D]` in q's dtype, and `[B, H, L]` in float32 or better, natural logarithm. A row without visible keys: 0
        and -inf.
    """
    # Called directly, without torch's dispatcher, these kernels misread tensors with other strides.
    q_BHLD, k_BKSD, v_BKSD = (t if t.stride(-1) == 1 else t.contiguous() for t in (q_BHLD, k_BKSD, v_BKSD))
    H, K = q_BHLD.shape[1], k_BKSD.shape[1]
    if H != K:
        k_BKSD, v_BKSD = (t.repeat_interleave(H // K, 1) for t in (k_BKSD, v_BKSD))
    bias = None if mask is None else _finite(additive(mask, q_BHLD.dtype))
    chosen = select(q_BHLD, k_BKSD, bias, kernel)
    out_BHLD, lse = chosen.run(q_BHLD, k_BKSD, v_BKSD, None if bias is None else _aligned(bias), scale)
    lse_BHL = lse.to(torch.promote_types(lse.dtype, torch.float32)).reshape(*q_BHLD.shape[:2], -1)[:, :, : q_BHLD.shape[2]]
    if bias is not None:
        # Kernels disagree about rows without visible keys: nan, 0, inf.
        empty = (bias.amax(-1) == -torch.inf).expand(lse_BHL.shape)
        lse_BHL = lse_BHL.masked_fill(empty, -torch.inf)
        out_BHLD = out_BHLD.masked_fill(empty.unsqueeze(-1), 0.0)
    return out_BHLD, lse_BHL


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive form of the mask, with four dimensions."""
    if mask.dtype == torch.bool:
        mask = torch.zeros((), dtype=dtype, device=mask.device).where(mask, -torch.inf)
    return mask.to(dtype)[(None,) * (4 - mask.ndim)]


def select(q: Tensor, k: Tensor, mask: Tensor | None, name: str | None = None) -> Kernel:
    """Return the kernel called `name` if it supports the inputs, else the first that does and that torch's switches allow. Raises
    ConfigError if there is no kernel of that name, or none that supports the inputs is allowed."""
    if name is not None:
        named = [kernel for kernel in KERNELS if kernel.name == name]
        if not named:
            raise bad_value("kernel", name, ", ".join(kernel.name for kernel in KERNELS), "Leave it open.")
        if named[0].supports(q, k, mask):
            return named[0]
    for kernel in (*_preferred(q.device), *KERNELS):
        if not kernel.on_request and kernel.allowed() and kernel.supports(q, k, mask):
            return kernel
    raise ConfigError(
        f"kernel: none that is allowed can attend with a query of {tuple(q.shape)}, {q.dtype}, on {q.device.type}"
        f"{'' if mask is None else ', with a mask'}. Allow another one: torch.nn.attention.sdpa_kernel, or the attention backend "
        '"native" of diffusers.'
    )


@cache
def _preferred(device: torch.device) -> tuple[Kernel, ...]:
    """Return the kernels preferred over the registry's order: cuDNN on Hopper and its successor, see docs/gpu.md."""
    fast = device.type == "cuda" and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))
    return tuple(kernel for kernel in KERNELS if fast and kernel.name == "cudnn")


def _finite(bias: Tensor) -> Tensor:
    """Clamp the mask's finite numbers to the range of all kernels; -inf still hides a key."""
    return bias.clamp_min(max(LOWEST, torch.finfo(bias.dtype).min)).masked_fill_(bias == -torch.inf, -torch.inf)


def _aligned(bias: Tensor) -> Tensor:
    """Return the mask with rows at aligned addresses, as CUDA kernels need: a ring slices the keys at any position."""
    *steps, step = bias.stride()
    if bias.device.type == "cpu" or (step == 1 and all(n % BIAS_ALIGNMENT == 0 for n in (bias.storage_offset(), *steps))):
        return bias
    keys = bias.shape[-1]
    padded = bias.new_empty((*bias.shape[:-1], -(-keys // BIAS_ALIGNMENT) * BIAS_ALIGNMENT))[..., :keys]
    return padded.copy_(bias)


@cache
def installed(module: str) -> Any:
    """Import an optional module; return None if it is missing or fails to load."""
    try:
        return importlib.import_module(module) if importlib.util.find_spec(module) else None
    except (ImportError, OSError, RuntimeError):  # built for another torch or driver
        return None


@cache
def _runs(package: str, run: Run, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether an installed package's kernel runs on a device, by trying it once: its build may be for other devices.

    Raises OutOfMemoryError if the device has no memory left, which tells nothing about the kernel.
    """
    tokens = torch.zeros(1, 1, 128, 64, device=device, dtype=dtype)
    try:
        run(tokens, tokens, tokens, None, None)
        wait_for(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (packages, and the compilers that they call, raise errors of any kind)
        log.warning("%s is installed, but fails on %s with %s; another attention kernel is used: %r", package, device, dtype, error)
        return False
    return True


def _plain_half(q: Tensor, mask: Tensor | None) -> bool:
    return q.device.type == "cuda" and q.dtype in HALF and mask is None and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0


def _torch_can(check: str, q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Ask torch whether one of its CUDA kernels supports these inputs on this device."""
    if q.device.type != "cuda":
        return False
    # Behind the mask: dropout, causal, grouped queries; then whether torch logs a refusal.
    return bool(getattr(switches, check)(switches.SDPAParams(q, k, k, mask, 0.0, False, False), False))


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    transposed = (t.transpose(1, 2) for t in (q, k, v))
    out, lse, _ = installed("flash_attn").flash_attn_func(*transposed, softmax_scale=scale, return_attn_probs=True)
    return out.transpose(1, 2), lse


def _sage(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    made = installed("sageattention").sageattn(q, k, v, tensor_layout="HND", sm_scale=scale, return_lse=True)
    if not isinstance(made, tuple):
        raise TypeError("version 1 accepts any keyword, and returns no log-sum-exp")
    return made[0], made[1]


def _torch(name: str, takes: Callable[[Tensor | None, Tensor | None], tuple[Any, ...]], keyword: str = "") -> Run:
    """Return one of torch's kernels.

    Args:
        name: name of its operator.
        takes: (mask, mask expanded to `[B, H, L, S]`) -> its arguments behind q, k and v.
        keyword: keyword of the mask, if it is not positional.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
        op = load_op(name)
        if op is None:
            raise ConfigError(f"kernel: this torch has no {name}. Update torch, or leave the kernel open.")
        more = takes(mask, None if mask is None else mask.expand(*q.shape[:3], k.shape[2]))
        out, lse, *_ = op(q, k, v, scale=scale, **{keyword: more[0]}) if keyword else op(q, k, v, *more, scale=scale)
        return out, lse

    return run


def _math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys, values = k.to(dtype).mT, v.to(dtype)
    mask = None if mask is None else mask.expand(-1, -1, q.shape[2], -1)
    rows = max(1, MATH_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    outs, lses = [], []
    for start in range(0, q.shape[2], rows):
        scores = (q[:, :, start : start + rows].to(dtype) * scale) @ keys
        if mask is not None:
            scores += mask[:, :, start : start + rows]
        # Not exp(scores - lse): where the mask hides a row by large numbers, the sum is lost in the rounding of lse.
        outs.append((scores.softmax(-1) @ values).to(q.dtype))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _package(name: str, run: Run, most: int, q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Return whether an installed package supports the inputs, with heads of up to `most` channels."""
    there = _plain_half(q, mask) and q.shape[-1] <= most and installed(name) is not None
    return there and _runs(name, run, q.device, q.dtype)


def _cpu_can(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    return q.device.type == "cpu" and q.dtype in (torch.float32, *HALF) and load_op(ON_CPU) is not None


# The first one that supports the inputs is taken; the last one supports all.
KERNELS: tuple[Kernel, ...] = (
    Kernel("flash_attn", _flash_attn, partial(_package, "flash_attn", _flash_attn, 256)),
    Kernel("sage", _sage, partial(_package, "sageattention", _sage, 128), on_request=True),
    Kernel(
        "flash",
        _torch("_scaled_dot_product_flash_attention", lambda mask, expanded: ()),
        lambda q, k, mask: _plain_half(q, mask) and _torch_can("can_use_flash_attention", q, k, mask),
    ),
    Kernel(
        # Not expanded: cuDNN accepts one mask for all heads, but not heads that alias each other; torch expands the rest.
        "cudnn",
        _torch("_scaled_dot_product_cudnn_attention", lambda mask, expanded: (mask, True)),
        lambda *inputs: _torch_can("can_use_cudnn_attention", *inputs),
        allowed=switches.cudnn_sdp_enabled,
    ),
    Kernel(
        "efficient",
        _torch("_scaled_dot_product_efficient_attention", lambda mask, expanded: (expanded, True)),
        lambda *inputs: _torch_can("can_use_efficient_attention", *inputs),
        allowed=switches.mem_efficient_sdp_enabled,
    ),
    Kernel("cpu", _torch(ON_CPU, lambda mask, expanded: (expanded,), "attn_mask"), _cpu_can),
    Kernel("math", _math, lambda *inputs: True, allowed=switches.math_sdp_enabled),
)
