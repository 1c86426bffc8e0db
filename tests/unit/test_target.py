from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cp_runtime.comfy.shared.values import Value
from cp_runtime.comfy.shared.weights import weight_patches_digest
from cp_runtime.comfy.ui.target import Target
from cp_runtime.errors import MirrorError
from cp_runtime.pool.messages import Load, Loaded

REQUEST = Load(key="k", name="flux.safetensors", network={}, blocks=(), patches=(), patches_uuid="u1")
SAME = SimpleNamespace(compare=lambda *_: None)
"""A fingerprint that the ranks have, too: tests/ranks compares real ones."""
PAYLOAD = torch.empty(0, dtype=torch.uint8)
GOOD = Loaded(digest=weight_patches_digest(REQUEST, PAYLOAD), formats=("fp8",), casts=False, code="c", bytes=1, seconds=1.0)
# What rank 1 has other than rank 0, and what is said about it.
CASES = {
    "equal mirrors": ({}, None),
    "digest": ({"digest": "e"}, r"rank 1 \(pid 11\) got other weight patches of flux.safetensors"),
    # One would compute its tokens in fp8, the other in half precision.
    "devices": ({"formats": ()}, r"flux.safetensors .* rank 0 in fp8; rank 1 in none\..*“which GPUs” of CP Config"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_differs_is_named(case):
    second, words = CASES[case]
    target = Target(SimpleNamespace(), Value("k", b"", (), (), frozenset(), frozenset()), "flux.safetensors", "kind", 0.0, SAME)
    with pytest.raises(MirrorError, match=words) if words else nullcontext():
        target.verify(REQUEST, PAYLOAD, [GOOD, replace(GOOD, **second)], [10, 11], lambda request: [])


@pytest.mark.parametrize(("travelled", "seen"), [(True, True), (False, False)])
def test_all_bytes_of_patches_are_compared_where_they_cross_a_network(travelled, seen):
    """A number between the samples is another one."""
    block, request = torch.arange(1 << 16).view(torch.uint8), replace(REQUEST, travelled=travelled)
    other = block.clone()
    other[100] += 1
    digests = [weight_patches_digest(request, each) for each in (block, other, block[: 1 << 16])]
    assert (digests[0] != digests[1]) is seen
    assert digests[2] not in digests[:2]
