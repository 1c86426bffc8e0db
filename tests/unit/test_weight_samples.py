"""Weights of two processes, compared as a whole or by samples: what is found, and what is left alone."""

import pytest
import torch
from torch import nn

from cp_runtime.comfy.shared.weights import differing_weight, same_weight, sample_weights

QuantizedTensor = pytest.importorskip("comfy_kitchen.tensor").QuantizedTensor


class Holder(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


def samples(weight):
    return sample_weights(Holder(weight))


def weight(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (3,), (64, 64), (1, 257, 3)])
def test_other_content_differs(dtype, shape):
    one, same, other = weight(*shape).to(dtype), weight(*shape).to(dtype), weight(*shape, seed=1).to(dtype)
    assert differing_weight(samples(one), samples(same)) is None
    assert differing_weight(samples(one), samples(other)) == "weight"


@pytest.mark.parametrize("layout", ["TensorCoreFP8Layout", "TensorCoreNVFP4Layout", "TensorWiseINT8Layout"])
def test_quantised_weights_by_data_and_scales(layout):
    one, same, other = (QuantizedTensor.from_float(weight(64, 64, seed=seed), layout) for seed in (0, 0, 1))
    rescaled = QuantizedTensor.from_float(weight(64, 64), layout)
    rescaled._params.scale.view(-1).view(torch.uint8)[0] ^= 1
    assert differing_weight(samples(one), samples(same)) is None
    assert differing_weight(samples(one), samples(other)) == "weight"
    assert differing_weight(samples(one), samples(rescaled)) == "weight"


def test_the_first_and_the_last_number_are_sampled():
    base = weight(1000, 1000)
    for place in (0, -1):
        changed = base.clone()
        changed.view(-1)[place] += 1
        assert differing_weight(samples(base), samples(changed)) == "weight"


def test_what_cannot_be_compared_is_left_out():
    assert samples(weight(64, 64).T) == {}
    assert samples(torch.empty(64, 64, device="meta")) == {}
    assert sample_weights(Holder(weight(3)), without={"weight"}) == {}
    one, other = samples(weight(64, 64)), samples(weight(64, 64, seed=1).bfloat16())
    assert differing_weight(one, other) is None
    assert differing_weight(one, {}) is None


def test_a_view_into_a_file_is_sampled_at_its_own_place():
    file = weight(10_000)
    assert samples(file[100:9_000]) == samples(file[100:9_000].clone()) != samples(file[101:9_001])


# --- whole weights ----------------------------------------------------------------------------------------------------


def test_plain_weights_are_compared_bit_by_bit():
    changed = weight(64, 64)
    changed[0, 0] = torch.nan
    assert same_weight(weight(64, 64), weight(64, 64))
    assert not same_weight(weight(64, 64), changed)
    assert same_weight(changed, changed.clone())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (4, 4)])
def test_weights_of_every_dtype_and_shape(dtype, shape):
    assert same_weight(torch.ones(shape).to(dtype), torch.ones(shape).to(dtype))
    assert not same_weight(torch.ones(shape).to(dtype), torch.zeros(shape).to(dtype))


@pytest.mark.parametrize(
    "layout", ["TensorCoreFP8Layout", "TensorCoreMXFP8Layout", "TensorCoreNVFP4Layout", "TensorWiseINT8Layout"]
)
def test_quantised_weights_are_compared_by_data_and_scales(layout):
    def quantised():
        return QuantizedTensor.from_float(weight(64, 64), layout)

    changed_data, changed_scale = quantised(), quantised()
    changed_data._qdata.view(torch.uint8)[5, 5] ^= 1
    changed_scale._params.scale.view(-1).view(torch.uint8)[0] ^= 1
    assert same_weight(quantised(), torch.nn.Parameter(quantised(), requires_grad=False))
    assert not same_weight(quantised(), changed_data)
    assert not same_weight(quantised(), changed_scale)
    assert not same_weight(quantised(), quantised().dequantize())
