"""Merge attention over parts of the keys, exactly, from each part's output and log-sum-exp.

With out_i = softmax-weighted values over part i and lse_i = log of the sum of exponentiated scores there, attention over both parts
is the average of the outputs with weights exp(lse_i - lse), lse = log(exp(lse_1) + exp(lse_2)). Source: Liu et al., "Ring
Attention", arXiv 2310.01889, and Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PartialAttention:
    """Accumulates outputs over parts of the keys, in place.

    Args:
        convert_to_fp32: keep the accumulated output in float32. The log-sum-exp always is.
    """

    def __init__(self, convert_to_fp32: bool = True) -> None:
        self._convert = convert_to_fp32
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, out_BHLD: Tensor, lse_BHL: Tensor) -> None:
        """Merge one part: `[B, H, L, D]` and `[B, H, L]`. Rows without visible keys must have log-sum-exp -inf and output 0."""
        if self._convert:
            out_BHLD = out_BHLD.to(torch.promote_types(out_BHLD.dtype, torch.float32))
        if self._out is None or self._lse is None:
            self._out, self._lse = out_BHLD, lse_BHL
            return
        lse = torch.logaddexp(self._lse, lse_BHL)
        # -inf - -inf is nan: no key has been visible so far, so the output stays 0.
        weight = torch.exp(lse_BHL - lse).nan_to_num_(0.0)
        self._out.lerp_(out_BHLD, weight.unsqueeze(-1).to(out_BHLD.dtype))
        self._lse = lse

    def result(self) -> Tensor | None:
        """Return the merged output, `[B, H, L, D]`; None if nothing was added."""
        return self._out
