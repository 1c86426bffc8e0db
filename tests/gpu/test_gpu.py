"""On an accelerator: every kernel that is found here, and the matrix of attention cases with the ranks sharing one device.

Ranks that share a device talk over gloo, through host memory: torch's accelerator backends want one device per rank.
"""

import sys
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks

from cp_runtime.engine.attention.kernels import KERNELS, attend_with_lse

ATTENTION = Path(__file__).parents[1] / "ranks" / "attention"
sys.path.append(str(ATTENTION))
from attention_cases import cases  # noqa: E402

DEVICE = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "none"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "none", reason="no accelerator")]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_kernels_equal_the_formula(kernel, dtype, masked):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 64, generator=generator).to(DEVICE, dtype) for n in (100, 77, 77))
    mask = torch.randn(2, 1, 100, 77, generator=generator).to(DEVICE, dtype) if masked else None
    if masked:
        mask[:, :, 3] = -torch.inf
    if not kernel.supports(q, k, mask):
        pytest.skip(f"{kernel.name} cannot do this here")
    exact, exact_lse = attend_with_lse(q.float(), k.float(), v.float(), None if mask is None else mask.float(), None, "math")
    out, lse = attend_with_lse(q, k, v, mask, None, kernel.name)
    tolerance = {"sage": 5e-2}.get(kernel.name, 1e-4 if dtype is torch.float32 else 2e-2)
    torch.testing.assert_close(out.float(), exact, atol=tolerance, rtol=0)
    torch.testing.assert_close(lse, exact_lse, atol=tolerance, rtol=0)


@pytest.mark.parametrize("world", [2, 4])
def test_attention_matrix(world):
    reports = run_ranks(ATTENTION / "attention_ranks.py", world, timeout=900, device=DEVICE)
    assert len(reports) == len(list(cases(world, whole=True)))
    assert all(r["finite"] for r in reports)
    assert [r for r in reports if r["dtype"] == "float32" and not r["difference"] <= 1e-5] == []
