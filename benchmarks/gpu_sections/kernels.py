"""Every attention kernel that returns a log-sum-exp, against the formula in float32; merging of parts; torch's own attention.

Errors are root mean squares, relative to the exact output; those of the log-sum-exp are the largest difference, relative above 1.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from cp_runtime.engine.attention.kernels import KERNELS, additive, attend_with_lse, select
from cp_runtime.engine.attention.ring import PartialAttention

from .section import Section, milliseconds

HEADS = 5
HEAD_DIMS = (64, 96, 120, 128, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MASKS = ("none", "keys", "rows", "heads", "lowest")
UNEVEN, SQUARE, HALF, VIDEO = (777, 1031), (4608, 4608), (4608, 2304), (9450, 75600)
BOUNDS = {"bfloat16": (1e-2, 2e-2), "float16": (2e-3, 4e-3), "float32": (1e-5, 1e-4)}
"""Of output and log-sum-exp; sage quantises and has no bound."""
PARTS = (1, 2, 4, 8)

Case = tuple[str, int, tuple[int, int], str]


def cases(section: Section) -> Iterator[Case]:
    """Every combination at an uneven length; at long ones the masks that models have there."""
    dims = (128,) if section.few else (64, 120, 128) if section.rehearse else HEAD_DIMS
    yield from itertools.product(DTYPES, dims, [(77, 103) if section.rehearse else UNEVEN], MASKS)
    if not section.rehearse:
        yield from itertools.product(DTYPES, dims, [SQUARE, HALF], ["none", "keys"])
        yield from itertools.product(DTYPES, [128], [SQUARE], ["rows"])
        if not section.few:
            yield from itertools.product(DTYPES, [128], [VIDEO], ["none"])


def make(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys and values with the strides that Ulysses leaves, `[B, H, L, D]`, and the mask."""
    dtype, dim, (queries, keys), kind = case
    generator = torch.Generator(device).manual_seed(queries + dim)
    normal = partial(torch.randn, generator=generator, device=device)
    q, k, v = (normal(length, 1, HEADS, dim).to(DTYPES[dtype]).permute(1, 2, 0, 3) for length in (queries, keys, keys))
    if kind == "none":
        return q, k, v, None
    if kind == "keys":
        return q, k, v, normal(1, 1, 1, keys) > -0.5
    mask = normal(1, HEADS if kind == "heads" else 1, queries, keys).to(q.dtype)
    mask[:, :, 3::17] = -torch.inf if kind != "lowest" else torch.finfo(q.dtype).min
    return q, k, v, mask


@torch.inference_mode()
def kernels(section: Section) -> None:
    """All cases, then merging and torch's own attention."""
    errors: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    chosen: defaultdict[str, set[str]] = defaultdict(set)
    failed: dict[tuple[str, str], str] = {}
    for case in cases(section):
        dtype, dim, (queries, keys), kind = case
        q, k, v, mask = make(case, section.device)
        exact = formula(q, k, v, mask)
        bias = None if mask is None else additive(mask, q.dtype)
        default = select(q, k, bias).name
        chosen[f"{dtype}, {'no mask' if mask is None else 'mask'}"].add(default)
        for name in (kernel.name for kernel in KERNELS if kernel.supports(q, k, bias)):
            if name == "math" and (queries, keys) == VIDEO:
                continue
            attend = partial(attend_with_lse, q, k, v, mask, None, name)
            text = f"{name}, {dtype}, D {dim}, {queries} x {keys}, mask {kind}"
            try:
                out, lse = attend()
                error, lse_error, took = rms(out, exact[0]), largest(lse, exact[1]), milliseconds(attend)
            except RuntimeError as raised:
                failed[name, dtype] = f"{text}: {raised}"
                continue
            errors[name, dtype].append((error, lse_error))
            section.add(text, detail=True, chosen=name == default, error=error, lse_error=lse_error, **took)
    for (name, dtype), found in errors.items():
        error, lse_error = (max(column) for column in zip(*found, strict=True))
        good = name == "sage" or (error <= BOUNDS[dtype][0] and lse_error <= BOUNDS[dtype][1])
        section.check(f"{name}, {dtype}", good, cases=len(found), error=error, lse_error=lse_error)
    for (name, dtype), reason in failed.items():
        section.check(f"{name}, {dtype}: errors", False, reason=reason)
    for kind, names in chosen.items():
        section.add(f"chosen for {kind}", kernels=sorted(names))
    for dtype in DTYPES:
        with section.part(f"merging, {dtype}"):
            _merge(section, dtype, (256, 256) if section.rehearse else SQUARE)


def _merge(section: Section, dtype: str, lengths: tuple[int, int]) -> None:
    """Chunks of the keys merged, as a ring does, against one call and against torch's attention."""
    q, k, v, _ = make((dtype, 128, lengths, "none"), section.device)
    exact, _ = formula(q, k, v)
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v)
    section.add(f"torch's attention, {dtype}", error=rms(sdpa(), exact), **milliseconds(sdpa))

    def merged(parts: int) -> Tensor:
        total = PartialAttention()
        for keys, values in zip(k.chunk(parts, 2), v.chunk(parts, 2), strict=True):
            total.add(*attend_with_lse(q, keys, values))
        out = total.out
        return q if out is None else out.to(q.dtype)

    for parts in PARTS:
        error = rms(merged(parts), exact)
        section.check(
            f"{parts} merged parts, {dtype}", error <= BOUNDS[dtype][0], error=error, **milliseconds(partial(merged, parts))
        )


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float32, head by head: the scores of all at once would be more than a card has."""
    whole = None if mask is None else additive(mask, torch.float32).expand(-1, HEADS, -1, -1)
    heads = []
    for own in (slice(head, head + 1) for head in range(HEADS)):
        masked = None if whole is None else whole[:, own]
        heads.append(attend_with_lse(*(tensor[:, own].float() for tensor in (q, k, v)), masked, None, "math"))
    outs, lses = zip(*heads, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def rms(out: Tensor, exact: Tensor) -> float:
    """Of the difference, relative to that of the exact values."""
    return ((out.float() - exact).square().mean() / exact.square().mean()).sqrt().item()


def largest(lse: Tensor, exact: Tensor) -> float:
    """Difference, see above; rows without visible keys must be -inf in both."""
    if not torch.equal(lse.isinf(), exact.isinf()):
        return torch.inf
    return ((lse - exact) / exact.abs().clamp_min(1.0))[~exact.isinf()].abs().max().item()
