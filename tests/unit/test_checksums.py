"""What a checksum tells apart, and when a number for weights is made again."""

import itertools

import pytest
import torch
from torch import nn

from cp_runtime.diffusers.checksums import COUNTED, Checksums, Weights, checksum
from cp_runtime.engine.ranks.collectives import RankGroup


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("shape", [(3, 5), (4, 8), (1,), (0,)])
def test_a_checksum_is_of_numbers_and_not_of_their_place_in_memory(dtype, shape):
    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    moved = torch.cat([values.reshape(-1)[:0], torch.zeros(1).to(dtype), values.reshape(-1)])[1:].reshape(shape)
    assert checksum(moved) == checksum(values)
    if values.ndim == 2:
        assert checksum(values.T.contiguous().T) == checksum(values)
    if values.numel() > 1:
        assert checksum(torch.zeros_like(values)) != checksum(values)


@pytest.mark.parametrize("factor", [-1.0, 2.0, 0.5, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_multiple_has_another_checksum(dtype, factor):
    values = torch.randn(1024, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert checksum(values * factor) != checksum(values)


def test_other_items_and_other_arguments_have_other_checksums():
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    orders = [values[list(order)] for order in itertools.permutations(range(3))]
    assert len({checksum(order) for order in orders}) == len({checksum(order[:, 0]) for order in orders}) == 6
    checks, sent = Checksums(nn.Linear(1, 1), RankGroup(None), always=False), []
    checks._post, checks._is_first = lambda host, on_device: sent.append(host), False
    for given in ((values, values + 1), (values + 1, values)):
        checks.begin(lambda *_: None, given, {})
    assert sent[0] != sent[1]
    checks.stop()


def test_a_number_expanded_over_a_batch_has_a_checksum():
    assert checksum(torch.tensor(3.0).expand(4)) == checksum(torch.full((4,), 3.0))


def test_a_number_for_weights_follows_every_change_that_torch_counts():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(COUNTED)))  # two weights each
    weights = Weights(model)
    before = weights.number()
    assert weights.number() == before
    with torch.no_grad():
        model[-1].bias += 1
    assert len({weights.number() for _ in range(3)} - {before}) == 1
    changed = weights.number()
    model[0] = nn.Sequential(model[0])
    assert weights.number() != changed
    weights.stop()


def test_the_number_is_the_same_for_the_same_weights():
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(nn.Linear(100, 100))
    one, other = (Weights(model).number() for model in made)
    assert one == other


def test_sums_of_inputs_wrap_around():
    checks, inputs = Checksums(nn.Linear(1, 1), RankGroup(None), always=False), {"x": [torch.full((1,), 2**62)] * 9}
    for _ in range(2):
        checks.end(checks.begin(lambda x: x, (), inputs), lambda x: x, (), inputs)
    checks.stop()
