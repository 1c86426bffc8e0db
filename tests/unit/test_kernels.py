"""Kernels that return (out, lse): all that run here agree with the formula, and with each other about empty rows."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cp_runtime.engine.attention import kernels
from cp_runtime.engine.attention.kernels import KERNELS, attend_with_lse, select
from cp_runtime.engine.attention.ring import PartialAttention
from cp_runtime.errors import ConfigError

HERE = [
    kernel.name
    for kernel in KERNELS
    if not kernel.on_request and kernel.supports(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8), None)
]


def qkv(batch=2, heads=6, kv_heads=2, queries=5, keys=7, dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def reference(q, k, v, bias=None, scale=None):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1).double() for t in (k, v))
    scores = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.double()
    return (scores.softmax(-1).nan_to_num(0.0) @ v).float(), scores.logsumexp(-1).float()


def masks():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 1, 5, 7, generator=generator)
    hidden[:, :, 2] = -torch.inf
    hidden[0, :, 4, :3] = -torch.inf
    return {
        "none": None,
        "keys": (torch.arange(7) < 4).view(1, 1, 1, 7).expand(2, 1, 1, 7),
        "two dimensions": torch.randn(5, 7, generator=generator),
        "heads": torch.randn(1, 6, 5, 7, generator=generator),
        "a row sees nothing": hidden,
        "nothing is seen": torch.zeros(1, 1, 5, 7, dtype=torch.bool),
    }


@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("scale", [None, 0.3])
def test_kernels_equal_the_formula_with_every_mask(kernel, name, scale):
    mask = masks()[name]
    q, k, v = qkv()
    out, lse = attend_with_lse(q, k, v, mask, scale, kernel)
    bias = mask if mask is None or mask.is_floating_point() else torch.zeros(()).where(mask, -torch.inf)
    expected, expected_lse = reference(q, k, v, bias, scale)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=0)


@pytest.mark.parametrize("kernel", HERE)
def test_kernels_take_any_strides(kernel):
    q, k, v = qkv(heads=3, kv_heads=3)
    strided = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in (q, k, v)]
    assert strided[0].stride(-1) != 1
    out, lse = attend_with_lse(*strided, None, None, kernel)
    expected, expected_lse = reference(q, k, v)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=0)


def test_float64_stays_float64():
    q, k, v = (t.double() for t in qkv(kv_heads=6))
    out, lse = attend_with_lse(q, k, v)
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_a_float32_lse(kernel, dtype):
    q, k, v = (t.to(dtype) for t in qkv())
    out, lse = attend_with_lse(q, k, v, masks()["a row sees nothing"], None, kernel)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    expected, expected_lse = reference(q, k, v, masks()["a row sees nothing"])
    torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=3e-2, rtol=0)


def test_math_in_pieces(monkeypatch):
    q, k, v = qkv()
    whole = attend_with_lse(q, k, v, None, None, "math")
    monkeypatch.setattr("cp_runtime.engine.attention.kernels.MATH_SCORES", 2 * 6 * 7 * 2)  # two rows at a time
    pieces = attend_with_lse(q, k, v, None, None, "math")
    torch.testing.assert_close(pieces, whole, atol=2e-6, rtol=0)


def test_choice_of_kernel():
    q, k, _ = qkv()
    assert HERE == ["cpu", "math"]
    assert select(q, k, None).name == "cpu"
    assert select(q, k, None, "math").name == "math"
    assert select(q.double(), k.double(), None).name == "math"
    assert select(q, k, None, "sage").name == "cpu"  # needs CUDA: the next one that can
    with pytest.raises(ConfigError, match=r"kernel: .* Got 'fast'; allowed: flash_attn, sage"):
        select(q, k, None, "fast")


def sage_1(q, k, v, is_causal=False, sm_scale=None, smooth_k=True, **kwargs):
    return q


def sage_2(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs):
    return (q, q[..., 0].float()) if return_lse else q


@pytest.mark.parametrize(
    ("sageattn", "dim", "chosen"),
    [(sage_1, 64, False), (sage_2, 64, True), (sage_2, 128, True), (sage_2, 192, False), (None, 64, False)],
    ids=["version 1", "version 2", "largest heads", "larger heads", "missing"],
)
def test_sage_where_it_returns_the_log_sum_exp(monkeypatch, sageattn, dim, chosen):
    module = None
    if sageattn is not None:
        module = ModuleType("sageattention")
        module.__spec__, module.sageattn = object(), sageattn
    monkeypatch.setitem(sys.modules, "sageattention", module)
    monkeypatch.setattr(kernels, "_torch_can", lambda check, *_: check == "can_use_flash_attention")
    monkeypatch.setattr(kernels, "wait_for", lambda _: None)
    monkeypatch.setattr(kernels, "_preferred", lambda _: ())
    caches = kernels.installed, kernels._runs
    for remembered in caches:
        remembered.cache_clear()
    try:
        with FakeTensorMode():  # tensors of a device that this machine need not have
            q, k = (torch.empty(1, 2, n, dim, device="cuda", dtype=torch.bfloat16) for n in (5, 7))
            assert select(q, k, None, "sage").name == ("sage" if chosen else "flash")
            if chosen:
                out, lse = attend_with_lse(q, k, k, kernel="sage")
                assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    finally:
        for remembered in caches:
            remembered.cache_clear()


@pytest.mark.parametrize(("kernel", "heads"), [("cudnn", 1), ("efficient", 6), ("cpu", 6)])
def test_only_kernels_that_need_it_get_a_mask_for_every_head(monkeypatch, kernel, heads):
    """What torch does itself before it calls them."""
    got = []

    def op(q, k, v, bias=None, *_, attn_mask=None, **__):
        got.append(bias if attn_mask is None else attn_mask)
        return q, q[..., 0]

    monkeypatch.setattr(kernels, "load_op", lambda _: op)
    monkeypatch.setattr(kernels, "KERNELS", [replace(each, supports=lambda *_: True) for each in KERNELS])
    q, k, v = qkv()
    attend_with_lse(q, k, v, masks()["keys"], None, kernel)
    assert [mask.shape[:2] for mask in got] == [(2, heads)]


@pytest.mark.parametrize(
    ("total", "part", "copied"), [(4096, slice(0, 2048), False), (4096, slice(8, 2056), True), (4097, slice(0, 2048), True)]
)
def test_rows_of_a_part_of_a_mask_start_at_aligned_addresses(total, part, copied):
    """The memory-efficient kernel refuses others."""
    mask = torch.empty(1, 1, 5, total, device="meta")[..., part]
    aligned = kernels._aligned(mask)
    assert (aligned is not mask) == copied
    assert aligned.shape == mask.shape
    assert {aligned.storage_offset() % 16, aligned.stride(-2) % 16} == {0}


@pytest.mark.parametrize("convert_to_fp32", [True, False])
@pytest.mark.parametrize("parts", [(7,), (3, 4), (1, 5, 1), (2, 2, 2, 1)])
@pytest.mark.parametrize("name", masks())
def test_merged_parts_are_the_whole_with_every_mask(parts, name, convert_to_fp32):
    mask = masks()[name]
    q, k, v = qkv()
    merged = PartialAttention(convert_to_fp32)
    start = 0
    for size in parts:
        stop = start + size
        part = None if mask is None else mask[..., start:stop]
        merged.add(*attend_with_lse(q, k[:, :, start:stop], v[:, :, start:stop], part))
        start = stop
    expected, _ = attend_with_lse(q, k, v, mask)
    torch.testing.assert_close(merged.out, expected, atol=2e-6, rtol=0)


def test_merging_in_half_precision_is_worse_than_in_float32():
    q, k, v = (t.bfloat16() for t in qkv(queries=64, keys=64, dim=64))
    exact, _ = reference(q, k, v)
    errors = {}
    for convert_to_fp32 in (True, False):
        merged = PartialAttention(convert_to_fp32)
        for start in range(0, 64, 8):
            merged.add(*attend_with_lse(q, k[:, :, start : start + 8], v[:, :, start : start + 8]))
        result = merged.out
        assert result.dtype == (torch.float32 if convert_to_fp32 else torch.bfloat16)
        errors[convert_to_fp32] = (result.to(torch.bfloat16).float() - exact).pow(2).mean().sqrt()
    assert errors[True] < 0.8 * errors[False]


PROGRAM = """
import logging
import sys
from types import ModuleType

import torch.distributed as dist
from cp_runtime.engine.attention.kernels import attend_with_lse, select
from cp_runtime.engine.measuring import measure
from cp_runtime.engine.ranks.mesh import SequenceMesh

logging.basicConfig(format="%(message)s")
tried, error = [], None


def attend(package, q, k, v):
    tried.append((package, q.device.index))
    if q.device.index == 0:
        raise error
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
    return out, lse


def flash_attn_func(q, k, v, softmax_scale, return_attn_probs):
    out, lse = attend("flash_attn", *(t.transpose(1, 2) for t in (q, k, v)))
    return out.transpose(1, 2), lse, None


def sageattn(q, k, v, tensor_layout, sm_scale, return_lse):
    return attend("sageattention", q, k, v)


for name, function in {"flash_attn": flash_attn_func, "sageattention": sageattn}.items():
    package = sys.modules[name] = ModuleType(name)
    package.__spec__ = object()
    setattr(package, function.__name__, function)
first, second = (torch.randn(1, 2, 40, 64, device=f"cuda:{number}").bfloat16() for number in range(2))

error = torch.OutOfMemoryError("full")
for _ in range(2):  # which says nothing about the package
    refused(torch.OutOfMemoryError, "full", lambda: attend_with_lse(first, first, first))
assert tried == [("flash_attn", 0)] * 2

error = RuntimeError("only Ampere GPUs or newer")
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
assert measure(SequenceMesh(dist.group.WORLD), torch.device("cuda", 0)).each[0].flops > 0
exact, exact_lse = attend_with_lse(*[first.float()] * 3, kernel="math")
for kernel in (None, "flash_attn", "sage", "sage"):
    out, lse = attend_with_lse(first, first, first, kernel=kernel)
    assert (out.float() - exact).abs().max() < 2e-2 and (lse - exact_lse).abs().max() < 2e-2
assert tried[2:] == [("flash_attn", 0), ("sageattention", 0)]
assert [select(second, second, None, kernel).name for kernel in (None, "sage")] == ["flash_attn", "sage"]
"""


def test_a_package_that_fails_on_a_device_is_tried_once_and_left(run_on_cards):
    """Through the measurement of a rank and through attention, on fake CUDA devices of which the first takes no package."""
    done = run_on_cards(PROGRAM, cards='kinds=("RTX 4090", "RTX 4090")')
    said = [line for line in done.stderr.splitlines() if "cuda:0" in line and "only Ampere GPUs or newer" in line]
    assert [line.split()[0] for line in said] == ["flash_attn", "sageattention"]


LOWEST_MASK = """
from cp_runtime.engine.attention.kernels import attend_with_lse
from cp_runtime.engine.attention.ring import PartialAttention

torch.manual_seed(0)
for device, dtype in (("cpu", torch.float32), ("cuda:0", torch.float32), ("cuda:0", torch.bfloat16)):
    q, k, v = (torch.randn(1, 2, 24, 64, device=device).to(dtype) for _ in range(3))
    for hidden in (torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -torch.inf):
        mask = torch.zeros(1, 1, 24, 24, device=device)
        mask[..., 8:] = hidden  # two chunks of a ring, of which every row sees a part of one
        total = PartialAttention()
        for start in (8, 0):
            keys = slice(start, start + (16 if start else 8))
            total.add(*attend_with_lse(q, k[:, :, keys], v[:, :, keys], mask[..., keys]))
        expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask)
        difference = (total.out - expected).abs().max().item()
        assert difference < (1e-5 if dtype is torch.float32 else 2e-2), (device, dtype, hidden, difference)
"""


def test_the_lowest_number_hides_a_whole_chunk_of_a_ring(run_on_cards):
    """On an H200 it made a chunk that no row sees the only one that counts."""
    run_on_cards(LOWEST_MASK, cards="count=1")


@pytest.mark.parametrize("kernel", [each.name for each in KERNELS if each.name in ("cpu", "math")])
def test_a_row_that_large_numbers_hide_is_the_mean(kernel):
    """As from torch's kernels, which nobody reads: "math" gave the sum, a thousand times as much of a thousand keys."""
    q, k, v = (torch.randn(1, 2, 24, 64) for _ in range(3))
    mask = torch.zeros(1, 1, 24, 24)
    mask[:, :, 3] = torch.finfo(torch.float32).min
    out, _ = attend_with_lse(q, k, v, mask, kernel=kernel)
    torch.testing.assert_close(out[:, :, 3], v.mean(2))


ORDER = """
from cp_runtime.engine.attention.kernels import select

for card, kernels in enumerate((("cudnn", "cudnn", "efficient"), ("flash", "cudnn", "efficient"))):
    for dtype, mask, kernel in zip((torch.bfloat16, torch.bfloat16, torch.float32), (False, True, False), kernels, strict=True):
        q = torch.zeros(1, 2, 64, 64, device=f"cuda:{card}", dtype=dtype)
        assert select(q, q, q[..., :64] if mask else None).name == kernel, (card, dtype, mask)
"""


def test_cudnn_comes_first_where_it_is_faster(run_on_cards):
    run_on_cards(ORDER, cards='kinds=("H100", "RTX 4090")')
