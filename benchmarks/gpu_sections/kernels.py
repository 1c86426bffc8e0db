"""Every attention kernel that returns a log-sum-exp, against the formula in float32; merging of parts; torch's own attention.

Errors are root mean squares, relative to the exact output; those of the log-sum-exp are the largest difference.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import torch
from support.package import load_package
from torch import Tensor

from .clock import milliseconds
from .options import Options
from .results import Results

load_package()

from cp_runtime.engine.attention.kernels import KERNELS, additive, attend_with_lse, select
from cp_runtime.engine.attention.ring import PartialAttention

HEADS = 5
HEAD_DIMS = (64, 96, 120, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MASKS = ("none", "keys", "rows", "heads")
UNEVEN, SQUARE, HALF, VIDEO = (777, 1031), (4608, 4608), (4608, 2304), (9450, 75600)
BOUNDS = {torch.bfloat16: (1e-2, 2e-2), torch.float16: (2e-3, 4e-3), torch.float32: (1e-5, 1e-4)}
"""Of output and log-sum-exp; sage quantises and has no bound."""
PARTS = (2, 4, 8)

Case = tuple[torch.dtype, int, tuple[int, int], str]


def cases(options: Options) -> Iterator[Case]:
    """Every combination at an uneven length; at long ones the masks that models have there."""
    if options.rehearse:
        dims = (128,) if options.few else (64, 120, 128)
        yield from itertools.product(DTYPES, dims, [(77, 103)], MASKS)
        return
    dims = (128,) if options.few else HEAD_DIMS
    yield from itertools.product(DTYPES, dims, [UNEVEN], MASKS)
    yield from itertools.product(DTYPES, dims, [SQUARE, HALF], ["none", "keys"])
    yield from itertools.product(DTYPES, [128], [SQUARE], ["rows"])
    if not options.few:
        yield from itertools.product(DTYPES, [128], [VIDEO], ["none"])


def make(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys and values with the strides that Ulysses leaves, `[B, H, L, D]`, and the mask."""
    dtype, dim, (queries, keys), kind = case
    generator = torch.Generator(device).manual_seed(queries + dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k, v = (normal(length, 1, HEADS, dim).to(dtype).permute(1, 2, 0, 3) for length in (queries, keys, keys))
    mask = None
    if kind == "keys":
        mask = normal(1, 1, 1, keys) > -0.5
    elif kind in ("rows", "heads"):
        mask = normal(1, HEADS if kind == "heads" else 1, queries, keys).to(dtype)
        mask[:, :, 3::17] = -torch.inf
    return q, k, v, mask


class Tally:
    """Measures cases, and keeps what is worst by kernel and dtype."""

    def __init__(self, device: str, results: Results) -> None:
        self._device, self._results = device, results
        self._errors: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self._chosen: defaultdict[str, set[str]] = defaultdict(set)
        self._failed: dict[tuple[str, str], str] = {}

    def measure(self, case: Case) -> None:
        """Every kernel that can do this."""
        dtype, dim, (queries, keys), kind = case
        q, k, v, mask = make(case, self._device)
        exact = formula(q, k, v, mask)
        bias = None if mask is None else additive(mask, dtype)
        default = select(q, k, bias).name
        self._chosen[f"{_short(dtype)}, {'no mask' if mask is None else 'mask'}"].add(default)
        for kernel in KERNELS:
            if not kernel.supports(q, k, bias) or (kernel.name == "math" and (queries, keys) == VIDEO):
                continue
            key, attend = (kernel.name, _short(dtype)), partial(attend_with_lse, q, k, v, mask, None, kernel.name)
            text = f"{kernel.name}, {key[1]}, D {dim}, {queries} x {keys}, mask {kind}"
            try:
                out, lse = attend()
                errors = rms(out, exact[0]), largest(lse, exact[1])
                ms = milliseconds(attend, self._device)
            except RuntimeError as error:
                self._failed[key] = f"{text}: {error}"
                continue
            self._errors[key].append(errors)
            chosen = kernel.name == default
            self._results.add(text, detail=True, chosen=chosen, error=errors[0], lse_error=errors[1], ms=ms)

    def report(self) -> None:
        """A result per kernel and dtype, and which kernel is taken when."""
        for (kernel, dtype), errors in self._errors.items():
            out_error, lse_error = (max(column) for column in zip(*errors, strict=True))
            bounds = BOUNDS[getattr(torch, dtype)]
            good = kernel == "sage" or (out_error <= bounds[0] and lse_error <= bounds[1])
            self._results.check(f"{kernel}, {dtype}", good, cases=len(errors), error=out_error, lse_error=lse_error)
        for (kernel, dtype), reason in self._failed.items():
            self._results.check(f"{kernel}, {dtype}: errors", False, reason=reason)
        for kind, names in self._chosen.items():
            self._results.add(f"chosen for {kind}", kernels=sorted(names))


@torch.inference_mode()
def run(options: Options, results: Results) -> None:
    """All cases, then merging and torch's own attention."""
    tally = Tally(options.device, results)
    for case in cases(options):
        tally.measure(case)
    tally.report()
    for dtype in DTYPES:
        with results.part(f"merging, {_short(dtype)}"):
            _merge(dtype, (256, 256) if options.rehearse else SQUARE, options.device, results)


def _merge(dtype: torch.dtype, lengths: tuple[int, int], device: str, results: Results) -> None:
    """Chunks of the keys merged, as a ring does, against one call and against torch's attention."""
    q, k, v, _ = make((dtype, 128, lengths, "none"), device)
    exact, _ = formula(q, k, v)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    results.add(
        f"torch's attention, {_short(dtype)}", error=rms(sdpa(q, k, v), exact), ms=milliseconds(lambda: sdpa(q, k, v), device)
    )

    def merged(parts: int) -> Tensor:
        total = PartialAttention()
        for keys, values in zip(k.chunk(parts, 2), v.chunk(parts, 2), strict=True):
            total.add(*attend_with_lse(q, keys, values))
        out = total.out
        return q if out is None else out.to(dtype)

    for parts in (1, *PARTS):
        error = rms(merged(parts), exact)
        ms = milliseconds(lambda parts=parts: merged(parts), device)
        results.check(f"{parts} merged parts, {_short(dtype)}", error <= BOUNDS[dtype][0], error=error, ms=ms)


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float32, head by head: the scores of all at once would be more than a card has."""
    whole = None if mask is None else additive(mask, torch.float32).expand(-1, HEADS, -1, -1)
    heads = []
    for head in range(HEADS):
        own = slice(head, head + 1)
        masked = None if whole is None else whole[:, own]
        heads.append(attend_with_lse(*(tensor[:, own].float() for tensor in (q, k, v)), masked, None, "math"))
    outs, lses = zip(*heads, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def rms(out: Tensor, exact: Tensor) -> float:
    """Of the difference, relative to that of the exact values."""
    return ((out.float() - exact).square().mean() / exact.square().mean()).sqrt().item()


def largest(lse: Tensor, exact: Tensor) -> float:
    """Difference; rows without visible keys must be -inf in both."""
    if not torch.equal(lse.isinf(), exact.isinf()):
        return torch.inf
    return (lse - exact)[~exact.isinf()].abs().max().item()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
