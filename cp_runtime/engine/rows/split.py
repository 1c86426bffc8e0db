"""Run a VAE's own forward on a part of the rows, and fetch other ranks' rows for operations that look across rows.

All computation of a VAE reaches torch as a few functions. Of these, convolutions look at neighbouring rows, and GroupNorm and
attention at all rows. While the forward runs, `SplitRows` performs those together with the other ranks; all other functions just
see a picture with fewer rows.

- A convolution runs on this rank's rows as they are. Meanwhile the neighbouring rows arrive, and the few rows of the result that
  depend on them are computed again. Large tensors are not copied, and the padding of the picture's edges does not matter (zeros,
  replicated, reflected, by the convolution or before it): only padding between ranks is replaced.
- Circular padding, which makes seamless pictures, is rows of the picture's other end.
- GroupNorm uses mean and variance of all rows, merged from each rank's in float32.
- Attention is `context_parallel_attention` over the tokens of all ranks.
- Caches of causal convolutions hold frames of this rank's rows: time is not split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...errors import PlanError
from ..attention.context_parallel import context_parallel_attention
from ..ranks.config import ContextParallelConfig
from ..ranks.mesh import SequenceMesh
from ..ranks.sharding import JointLayout
from .exchange import Neighbours, row_layout, rows_of

STATISTICS = 64 << 20  # bytes of half-precision values to convert at a time for mean and variance
NEAREST = ("nearest", "nearest-exact")
ACROSS = frozenset(
    {
        F.conv_transpose2d, F.conv_transpose3d, F.unfold, F.fold, F.instance_norm, F.grid_sample, F.local_response_norm,
        F.avg_pool2d, F.avg_pool3d, F.max_pool2d, F.max_pool3d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
        F.adaptive_max_pool2d, F.adaptive_max_pool3d,
    }
)  # fmt: skip
"""Functions that look across rows and that no VAE with a plan calls."""

CONVOLUTIONS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((torch.conv2d, torch.conv3d), ("bias", "stride", "padding", "dilation", "groups")),
    torch.cudnn_convolution: ("padding", "stride", "dilation", "groups", "benchmark", "deterministic", "allow_tf32"),
}
"""Convolutions that ranks share, and their arguments behind input and weight."""


class SplitRows(TorchFunctionMode):
    """While active, tensors of images and videos hold a part of the rows, but are processed as if they held all.

    Every rank must run the same forward, in one thread.

    Args:
        layout: rows of the latent (`row_layout`).
        mesh: the ranks that share them.
        dim: dimension that is split, from the end: -2 for rows, -1 for columns.
        on_convolution: called at every convolution, equally often on all ranks.
    """

    def __init__(
        self, layout: JointLayout, mesh: SequenceMesh, dim: int = -2, on_convolution: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._layout, self._mesh, self._dim, self._on_convolution = layout, mesh, dim, on_convolution
        start, stop = layout.window(mesh.rank)
        self._held = stop - start
        self._parts_on: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._config = ContextParallelConfig(ring_degree=mesh.size, ring_anything=True)
        self._handlers: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys(CONVOLUTIONS, self._conv),
            F.group_norm: self._group_norm,
            F.interpolate: self._interpolate,
            F.pad: self._pad,
            F.scaled_dot_product_attention: self._sdpa,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, *args, **(kwargs or {}))
        if func in ACROSS:
            raise PlanError(f"{func.__name__} looks across the rows that ranks share, and is not shared. Decode in tiles.")
        return func(*args, **(kwargs or {}))

    def gather(self, local: Tensor, *, first_only: bool = False) -> Tensor | None:
        """Gather the rows of all ranks. With `first_only`, only the first rank gets them; None on all others."""
        group, dim = self._mesh.whole, self._dim
        scale, rest = divmod(local.shape[dim], self._held)
        if rest:
            raise PlanError(
                f"the result has {local.shape[dim]} rows for {self._held} of the latent, which is no whole number of each"
            )
        lengths = [rows * scale for rows in self._layout.owned_lengths]
        own = local.narrow(dim, 0, lengths[group.rank])
        if not first_only:
            return group.all_gather([own], lengths, dim)[0]
        per_row = local.numel() // local.shape[dim]
        parts = group.to_first(own, [length * per_row for length in lengths], "rows")
        return torch.cat([rows_of(part, local, dim) for part in parts], dim) if parts else None

    # --- functions that look across rows ------------------------------------------------------------------------------------

    def _conv(self, func: Callable[..., Tensor], input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = {"stride": 1, "padding": 0, "dilation": 1, **dict(zip(CONVOLUTIONS[func], args, strict=False)), **kwargs}

        def run(x: Tensor, padding: list[int]) -> Tensor:
            return func(x, weight, **{**given, "padding": padding})

        if self._on_convolution is not None:
            self._on_convolution()
        padding = given["padding"]
        if isinstance(padding, str):
            if padding != "valid":
                raise PlanError(f'convolution with padding={padding!r}; allowed between ranks: numbers, "valid". Decode in tiles.')
            padding = 0
        strides, paddings, dilations = (_each(v, weight.ndim - 2) for v in (given["stride"], padding, given["dilation"]))
        reach = (weight.shape[self._dim] - 1) * dilations[self._dim] + 1
        window = Window(input.shape[self._dim], self._held, reach, strides[self._dim], paddings[self._dim])
        # Alike on all ranks: these follow from kernel, stride and padding, not from the rows of a rank.
        if not window.above and not window.below:
            return run(input, paddings)
        group, dim, layout = self._mesh.whole, self._dim, self._layout
        own = input.narrow(dim, window.given, window.rows)
        # Under way while the convolution runs. Also on a rank that needs no rows: others may need its own.
        neighbours = Neighbours(group, own, dim, layout, window.rows // self._held, window.above, window.below)
        start, stop = layout.contributed(group.rank)
        edges = start == 0, stop in (0, layout.total)
        first = 0 if edges[0] else window.first_complete
        last = window.out if edges[1] else window.last_complete
        inside = list(paddings)
        inside[dim] = 0
        out = run(input, paddings) if first < last else None  # with so few rows, all of the result depends on others
        around = self._rows_to_read(input, own, window, neighbours, edges)
        if out is None:
            return run(_rows(around, dim, *window.reads(0, window.out)), inside)
        for begin, end in ((0, first), (last, window.out)):
            if end > begin:
                out.narrow(dim, begin, end - begin).copy_(run(_rows(around, dim, *window.reads(begin, end)), inside))
        return out

    def _rows_to_read(
        self, x: Tensor, own: Tensor, window: Window, neighbours: Neighbours, edges: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows that the convolution reads: above, this rank's, below. `edges`: which are the picture's."""
        above, below = neighbours.wait()
        given = x.split([window.given, window.rows, x.shape[self._dim] - window.given - window.rows], self._dim)
        if x.shape[self._dim] > window.rows:  # it is padded
            if any(missing and not edge for missing, edge in zip(neighbours.missing, edges, strict=True)):
                raise PlanError(
                    f"a convolution reads {window.above} rows above and {window.below} below, and a neighbour has fewer. Use fewer "
                    "ranks."
                )
            above, below = given[0] if edges[0] else above, given[2] if edges[1] else below
        return above, own, below

    def _pad(
        self, func: Callable[..., Tensor], input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
    ) -> Tensor:
        place = -2 - 2 * self._dim  # pairs of numbers, from the last dimension on
        above, below = pad[place : place + 2] if mode == "circular" and len(pad) > place else (0, 0)
        if not above and not below:
            return func(input, pad, mode, value)
        dim, rows, owned = self._dim, input.shape[self._dim], self._layout.owned_lengths
        there = [rank for rank, length in enumerate(owned) if length]
        if rows % self._held or max(above, below) > rows // self._held * min(owned[there[0]], owned[there[-1]]):
            raise PlanError(f"circular padding by {above} and {below} of {rows} rows is not shared. Decode in tiles.")
        top, bottom = input.narrow(dim, 0, below), input.narrow(dim, rows - above, above)
        # Of all ranks with rows only the first and the last contribute.
        lengths = [below * (rank == there[0]) + above * (rank == there[-1]) for rank in range(len(owned))]
        mine = [part for part, rank in ((top, there[0]), (bottom, there[-1])) if rank == self._mesh.rank]
        (ends,) = self._mesh.whole.all_gather([torch.cat([input.narrow(dim, 0, 0), *mine], dim)], lengths, dim)
        top, bottom = ends.split([below, above], dim)
        return func(torch.cat([bottom, input, top], dim), [*pad[:place], 0, 0, *pad[place + 2 :]], mode, value)

    def _group_norm(
        self,
        func: Callable[..., Tensor],
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        B, C = input.shape[:2]
        x_BGN = input.reshape(B, num_groups, -1)
        group, layout = self._mesh.whole, self._layout
        # [1, mean and variance, B, G] from every rank with rows
        local = torch.stack(mean_and_variance(x_BGN)).unsqueeze(0)
        there = [int(size > 0) for size in layout.owned_lengths]
        (all_ranks,) = group.all_gather([local[: there[group.rank]]], there, 0)
        shares = self._parts(local)
        means, variances = all_ranks.unbind(1)
        # The law of total variance, over ranks in proportion to their rows.
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean) ** 2)).sum(0)
        # Batch norm with these as its running statistics: one pass, in float32, without a copy.
        mean, variance = (t.repeat_interleave(C // num_groups, 1).reshape(-1) for t in (mean, variance))
        weight, bias = (None if t is None else t.to(local.dtype).repeat(B) for t in (weight, bias))
        out = F.batch_norm(input.reshape(1, B * C, -1), mean, variance, weight, bias, training=False, eps=eps)
        return out.view(input.shape)

    def _parts(self, like: Tensor) -> Tensor:
        """Return each rank's fraction of the rows, `[ranks with rows, 1, 1]`, made on the device so that the host does not wait."""
        key = like.device, like.dtype
        if key not in self._parts_on:
            parts = [like.new_full((1, 1, 1), rows / self._layout.total) for rows in self._layout.owned_lengths if rows]
            self._parts_on[key] = torch.cat(parts)
        return self._parts_on[key]

    def _interpolate(
        self,
        func: Callable[..., Tensor],
        input: Tensor,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        **kwargs: Any,
    ) -> Tensor:
        factor = None if scale_factor is None else _each(scale_factor, input.ndim - 2)[self._dim]
        if mode not in NEAREST or size is not None or factor is None or factor != int(factor):
            raise PlanError(
                f"interpolate(size={size}, scale_factor={scale_factor}, mode={mode!r}) looks across the rows that ranks share; "
                "allowed: nearest, by whole numbers. Decode in tiles."
            )
        return func(input, size, scale_factor, mode, **kwargs)

    def _sdpa(
        self,
        func: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or is_causal or query.shape[-2] != key.shape[-2]:
            raise PlanError("attention with a mask, or with other keys than the picture's, is not shared. Decode in tiles.")
        unit, rest = divmod(query.shape[-2], self._held)
        if rest:
            raise PlanError(f"attention over {query.shape[-2]} tokens for {self._held} rows, which is no whole number of each")
        layout = row_layout(self._layout.total, self._mesh.size, self._layout.splits[0].least, self._layout.shares, unit)
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        out = context_parallel_attention(q, k, v, mesh=self._mesh, config=self._config, q_layout=layout, scale=scale)
        return out.transpose(1, 2)


class Window:
    """The rows that a convolution reads: those of this rank and their neighbours.

    Rows are counted from this rank's first one; row j of the result reads `reach` rows from `j * stride - above` on.

    Args:
        size: rows of its input, including existing padding.
        held: rows of the latent that this rank holds.
        reach: rows that one row of the result spans.
        padding: rows that the convolution itself adds on either side.

    Attributes:
        rows: rows of this rank, without padding.
        given: rows of existing padding above them.
        out: rows of the result.
        above, below: rows of other ranks or padding that the result reads.

    Raises:
        PlanError: the result would not have a whole number of rows for each row of the latent.
    """

    def __init__(self, size: int, held: int, reach: int, stride: int, padding: int) -> None:
        out = (size + 2 * padding - reach) // stride + 1
        rows = out * stride
        extra = size - rows
        if out <= 0 or out % held or extra < 0 or (extra and padding):
            raise PlanError(
                f"a convolution makes {out} rows of {size}, with {held} of the latent (kernel {reach}, stride {stride}, padding "
                f"{padding}): that cannot be split between rows of the latent. Decode in tiles."
            )
        self.rows, self.out, self._reach, self._stride = rows, out, reach, stride
        self.given = extra // 2  # an odd row is below: encoders pad there before they halve
        self.above = padding + self.given
        self.below = max(0, reach - stride - self.above)

    @property
    def first_complete(self) -> int:
        """First row of the result that depends on no row above this rank's."""
        return min(self.out, math.ceil(self.above / self._stride))

    @property
    def last_complete(self) -> int:
        """End (exclusive) of the rows of the result that depend on no row below this rank's."""
        return max(0, min(self.out, (self.rows + self.above - self._reach) // self._stride + 1))

    def reads(self, begin: int, end: int) -> tuple[int, int]:
        """Return (start, stop) of the rows that rows [begin, end) of the result read, counted from the first row above."""
        return begin * self._stride, (end - 1) * self._stride + self._reach


def mean_and_variance(x_BGN: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance over the last dimension, `[B, G]`, in float32 or better."""
    dtype = torch.promote_types(x_BGN.dtype, torch.float32)
    moments: Callable[[Tensor], tuple[Tensor, Tensor]] = partial(torch.var_mean, dim=-1, correction=0)
    groups = x_BGN.shape[1]
    if x_BGN.device.type == "cpu":
        moments, groups = _moments_on_cpu, 1  # one group at a time, so that its extra output is small and its memory is reused
    elif dtype != x_BGN.dtype:  # on a GPU, as few kernels as memory for converted values allows
        groups = max(1, STATISTICS // max(1, x_BGN[:, :1].nbytes))
    variances, means = zip(*(moments(part.to(dtype)) for part in x_BGN.split(groups, 1)), strict=True)
    return torch.cat(means, 1), torch.cat(variances, 1)


def _moments_on_cpu(x_BGN: Tensor) -> tuple[Tensor, Tensor]:
    """Return variance and mean. On CPUs, `var_mean` is scalar code and takes three times as long as stock's whole GroupNorm."""
    B, G, N = x_BGN.shape
    _, mean, inverse_deviation = torch.native_group_norm(x_BGN.contiguous(), None, None, B, G, N, G, 0.0)
    return inverse_deviation.pow(-2), mean


def _rows(parts: Sequence[Tensor], dim: int, start: int, stop: int) -> Tensor:
    """Return rows [start, stop) of the concatenation of some parts."""
    found = []
    for part in parts:
        size = part.shape[dim]
        low, high = max(start, 0), min(stop, size)
        if low < high:
            found.append(part.narrow(dim, low, high - low))
        start, stop = start - size, stop - size
    return torch.cat(found, dim)


def _each(value: Any, dims: int) -> list[Any]:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return values * dims if len(values) == 1 else values
